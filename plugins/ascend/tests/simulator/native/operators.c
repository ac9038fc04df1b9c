/* Compile options, and the operators that torch_npu launches by name: only those that reading and clearing the overflow register needs are simulated. */
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- options, remembered by number. "disable" for just-in-time compilation sends operators to aclnn; what CANN really answers is not known here ---- */

enum { OPTIONS = 32, OPTION_BYTES = 256, PARAMETERS = 8 };

static char options[OPTIONS][OPTION_BYTES];
static int64_t parameters[PARAMETERS];

static const char *option(int key) {
  return key >= 0 && key < OPTIONS && options[key][0] ? options[key] : knob_text("CANN_STUB_JIT", "disable");
}

API Status aclSetCompileopt(int key, const char *value) {
  trace("aclSetCompileopt(%d, %s)", key, value);
  if (key >= 0 && key < OPTIONS) snprintf(options[key], OPTION_BYTES, "%s", value);
  return OK;
}

API size_t aclGetCompileoptSize(int key) { return strlen(option(key)) + 1; }

API Status aclGetCompileopt(int key, char *value, size_t bytes) {
  snprintf(value, bytes, "%s", option(key));
  return OK;
}

API Status aclrtSetSysParamOpt(int key, int64_t value) {
  if (key >= 0 && key < PARAMETERS) parameters[key] = value;
  return OK;
}

API Status aclrtCtxSetSysParamOpt(int key, int64_t value) { return aclrtSetSysParamOpt(key, value); }

API Status aclrtGetSysParamOpt(int key, int64_t *value) {
  *value = key >= 0 && key < PARAMETERS ? parameters[key] : 0;
  return OK;
}

/* ---- operators by name ---- */

enum { TYPE_FLOAT32 = 0, TYPE_FLOAT16 = 1 };

struct description {
  int type;
};

struct buffer {
  void *address;
  size_t bytes;
};

API void *aclCreateTensorDesc(int type, int rank, const int64_t *sizes, int format) {
  (void)rank;
  (void)sizes;
  (void)format;
  struct description *description = malloc(sizeof *description);
  description->type = type;
  return description;
}

API void aclDestroyTensorDesc(const void *description) { free((void *)description); }

API void *aclCreateDataBuffer(void *address, size_t bytes) {
  struct buffer *buffer = malloc(sizeof *buffer);
  *buffer = (struct buffer){address, bytes};
  return buffer;
}

API Status aclDestroyDataBuffer(const void *buffer) {
  free((void *)buffer);
  return OK;
}

API void *aclopCreateAttr(void) { return calloc(1, sizeof(int)); }
API void aclopDestroyAttr(const void *attributes) { free((void *)attributes); }

static void clear(struct buffer *buffer) {
  if (buffer && buffer->address) memset(buffer->address, 0, buffer->bytes);
}

/* Unscaling a gradient: fp32 times one fp32 number. */
static int multiply(int type, struct buffer *const in[], struct buffer *out) {
  if (type != TYPE_FLOAT32 || in[1]->bytes < sizeof(float)) return 0;
  const float *values = in[0]->address, factor = *(const float *)in[1]->address;
  for (size_t i = 0; i < in[0]->bytes / sizeof(float) && i < out->bytes / sizeof(float); i++) ((float *)out->address)[i] = values[i] * factor;
  return 1;
}

/* Whether the type is one that the register's operators use. */
static int fill_ones(int type, struct buffer *buffer) {
  if (type == TYPE_FLOAT32)
    for (size_t i = 0; i < buffer->bytes / 4; i++) ((float *)buffer->address)[i] = 1.0f;
  else if (type == TYPE_FLOAT16)
    for (size_t i = 0; i < buffer->bytes / 2; i++) ((uint16_t *)buffer->address)[i] = 0x3c00;
  else
    return 0;
  return 1;
}

API Status aclopCompileAndExecute(const char *name, int inputs, void *const input_types[], struct buffer *const in[], int outputs, void *const output_types[],
                                  struct buffer *const out[], const void *attributes, int engine, int flag, const char *path, void *stream) {
  (void)input_types;
  (void)attributes;
  (void)engine;
  (void)flag;
  (void)path;
  (void)stream;
  trace("operator %s, %d inputs, %d outputs", name, inputs, outputs);
  if (!strcmp(name, "NPUAllocFloatStatus")) {
    clear(out[0]);
  } else if (!strcmp(name, "NPUGetFloatStatus")) {
    if (inputs > 0) ((float *)in[0]->address)[0] = overflow_register ? 1.0f : 0.0f;
    if (outputs > 0) clear(out[0]);
  } else if (!strcmp(name, "NPUGetFloatStatusV2")) {
    clear(out[0]);
    ((int32_t *)out[0]->address)[0] = overflow_register;
  } else if (!strcmp(name, "NPUClearFloatStatus") || !strcmp(name, "NPUClearFloatStatusV2")) {
    overflow_register = 0;
    if (outputs > 0) clear(out[0]);
  } else if (!strcmp(name, "Mul") && multiply(((struct description *)output_types[0])->type, in, out[0])) {
    return OK;
  } else if (!strcmp(name, "OnesLike") && fill_ones(((struct description *)output_types[0])->type, out[0])) {
    return OK;
  } else {
    fprintf(stderr, "[stand-in] operator %s is not simulated\n", name);
    return NOT_SIMULATED;
  }
  return OK;
}

API Status aclopCompileAndExecuteV2(const char *name, int inputs, void *input_types[], struct buffer *in[], int outputs, void *output_types[],
                                    struct buffer *out[], void *attributes, int engine, int flag, const char *path, void *stream) {
  return aclopCompileAndExecute(name, inputs, input_types, in, outputs, output_types, out, attributes, engine, flag, path, stream);
}
