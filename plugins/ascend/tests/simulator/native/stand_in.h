/* What the parts of the stand-in share. See ../README.md for what it is and what it is not. */
#ifndef STAND_IN_H
#define STAND_IN_H

#include <stddef.h>
#include <stdint.h>

#define API __attribute__((visibility("default")))

typedef int Status;

enum {
  OK = 0,
  INVALID_PARAMETER = 107000,
  NO_CONTEXT = 107002,
  OUT_OF_MEMORY = 207001,
  NOT_SIMULATED = 500002,
};

enum { MAX_DEVICES = 16, CUBE_CORES = 24, VECTOR_CORES = 48 };

/* The text of an environment variable, or a default where it is unset or empty. */
const char *knob_text(const char *name, const char *otherwise);
long knob_number(const char *name, long otherwise);

/* Prints one line to stderr when CANN_STUB_TRACE=1. */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The device of this thread; 0 where it has chosen none. */
int present_device(void);
size_t device_capacity(void);

/* Accounting of device memory: whether `bytes` more fit, and booking them. */
int reserve(int device, size_t bytes);
void release(int device, size_t bytes);
size_t used(int device);

/* The overflow register: sticky, one for the process. */
extern int overflow_register;

#endif
