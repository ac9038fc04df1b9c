/* Streams run everything at once, so waiting is nothing; an event is the host's clock at the moment it was recorded. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* ---- streams ---- */

struct stream {
  int id;
  uint32_t overflow_switch;
};

API Status aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) {
  (void)priority;
  (void)flags;
  static int next = 1;
  struct stream *made = calloc(1, sizeof *made);
  made->id = __sync_fetch_and_add(&next, 1);
  *stream = made;
  return OK;
}

API Status aclrtCreateStream(void **stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

API Status aclrtDestroyStream(void *stream) {
  (void)stream;
  return OK;
}

API Status aclrtDestroyStreamForce(void *stream) {
  (void)stream;
  return OK;
}

API Status aclrtSynchronizeStream(void *stream) {
  (void)stream;
  return OK;
}

API Status aclrtSynchronizeStreamWithTimeout(void *stream, int32_t milliseconds) {
  (void)stream;
  (void)milliseconds;
  return OK;
}

API Status aclrtStreamQuery(void *stream, int *state) {
  (void)stream;
  *state = 0;
  return OK;
}

API Status aclrtStreamGetId(void *stream, int32_t *id) {
  *id = stream ? ((struct stream *)stream)->id : 0;
  return OK;
}

API Status aclrtSetStreamFailureMode(void *stream, uint64_t mode) {
  (void)stream;
  (void)mode;
  return OK;
}

API Status aclrtSetStreamAttribute(void *stream, int attribute, void *value) {
  (void)stream;
  (void)attribute;
  (void)value;
  return OK;
}

API Status aclrtSetStreamOverflowSwitch(void *stream, uint32_t flag) {
  if (stream) ((struct stream *)stream)->overflow_switch = flag;
  return OK;
}

API Status aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) {
  *flag = stream ? ((struct stream *)stream)->overflow_switch : 0;
  return OK;
}

/* ---- events ---- */

struct event {
  uint64_t nanoseconds;
};

API Status aclrtCreateEventExWithFlag(void **event, uint32_t flag) {
  (void)flag;
  *event = calloc(1, sizeof(struct event));
  return OK;
}

API Status aclrtCreateEventWithFlag(void **event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

API Status aclrtCreateEvent(void **event) { return aclrtCreateEventExWithFlag(event, 0); }

API Status aclrtDestroyEvent(void *event) {
  free(event);
  return OK;
}

API Status aclrtRecordEvent(void *event, void *stream) {
  (void)stream;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  ((struct event *)event)->nanoseconds = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
  return OK;
}

API Status aclrtResetEvent(void *event, void *stream) {
  (void)event;
  (void)stream;
  return OK;
}

API Status aclrtStreamWaitEvent(void *stream, void *event) {
  (void)stream;
  (void)event;
  return OK;
}

API Status aclrtSynchronizeEvent(void *event) {
  (void)event;
  return OK;
}

enum { EVENT_COMPLETE = 1, EVENT_WAIT_COMPLETE = 0 };

API Status aclrtQueryEventStatus(void *event, int *state) {
  (void)event;
  *state = EVENT_COMPLETE;
  return OK;
}

API Status aclrtQueryEventWaitStatus(void *event, int *state) {
  (void)event;
  *state = EVENT_WAIT_COMPLETE;
  return OK;
}

API Status aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
  int64_t nanoseconds = (int64_t)(((struct event *)end)->nanoseconds - ((struct event *)start)->nanoseconds);
  *milliseconds = (float)((double)nanoseconds / 1e6);
  return OK;
}

API Status aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
  *microseconds = ((struct event *)event)->nanoseconds / 1000;
  return OK;
}

/* ---- callbacks of the host ---- */

API Status aclrtLaunchCallback(void (*function)(void *), void *data, int block, void *stream) {
  (void)block;
  (void)stream;
  function(data);
  return OK;
}

API Status aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  (void)stream;
  function(data);
  return OK;
}

API Status aclrtSubscribeReport(uint64_t thread, void *stream) {
  (void)thread;
  (void)stream;
  return OK;
}

API Status aclrtUnSubscribeReport(uint64_t thread, void *stream) {
  (void)thread;
  (void)stream;
  return OK;
}

API Status aclrtProcessReport(int32_t milliseconds) {
  usleep(milliseconds > 0 && milliseconds < 50 ? (unsigned)milliseconds * 1000 : 50000);
  return OK;
}
