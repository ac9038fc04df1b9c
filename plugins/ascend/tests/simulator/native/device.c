/* Life cycle, identity of the SoC, devices and contexts, the overflow mode and its register. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *knob_text(const char *name, const char *otherwise) {
  const char *value = getenv(name);
  return value && *value ? value : otherwise;
}

long knob_number(const char *name, long otherwise) {
  const char *value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

void trace(const char *format, ...) {
  static int on = -1;
  if (on < 0) on = (int)knob_number("CANN_STUB_TRACE", 0);
  if (!on) return;
  va_list arguments;
  va_start(arguments, format);
  fputs("[stand-in] ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

/* ---- what a program can ask to tell a stand-in from the vendor's library ---- */

API const char *npu_simulator_version(void) { return "0.1.0"; }

/* ---- life cycle ---- */

API Status aclInit(const char *configuration) {
  trace("aclInit(%s)", configuration ? configuration : "null");
  return OK;
}

API Status aclFinalize(void) { return OK; }

API const char *aclGetRecentErrMsg(void) { return ""; }

API void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...) {
  (void)file;
  int wanted = (int)knob_number("CANN_STUB_LOG", -1);
  if (wanted < 0 || level < wanted) return;
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "[stand-in log %d] %s:%u ", level, function ? function : "?", line);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  va_end(arguments);
}

/* ---- identity ---- */

API const char *aclrtGetSocName(void) { return knob_text("CANN_STUB_SOC", "Ascend910B1"); }

struct package_version {
  char version[128], major[64], minor[64], release[64], patch[64], reserved[128];
};

enum { PACKAGE_DRIVER = 7 };

API Status aclsysGetCANNVersion(int package, struct package_version *version) {
  memset(version, 0, sizeof *version);
  const char *text = package == PACKAGE_DRIVER ? knob_text("CANN_STUB_DRIVER", "25.2.0") : knob_text("CANN_STUB_VERSION", "8.5.0");
  snprintf(version->version, sizeof version->version, "%s", text);
  return OK;
}

API Status aclsysGetVersionStr(char *package, char *version) {
  (void)package;
  strcpy(version, knob_text("CANN_STUB_VERSION", "8.5.0"));
  return OK;
}

/* CANN reads support_inf_nan from the platform file, which only A2, A3 and 950 carry. "Ascend910B" without a digit is the first generation. */
static int has_inf_nan(void) {
  const char *soc = aclrtGetSocName();
  if (!strncmp(soc, "Ascend950", 9) || !strncmp(soc, "Ascend910_93", 12)) return 1;
  return !strncmp(soc, "Ascend910B", 10) && soc[10] >= '1' && soc[10] <= '9';
}

enum { ATTRIBUTE_INF_NAN = 0 };

API Status aclGetCannAttribute(int attribute, int32_t *value) {
  *value = attribute == ATTRIBUTE_INF_NAN ? (int32_t)knob_number("CANN_STUB_INF_NAN", has_inf_nan()) : 1;
  return OK;
}

API Status aclGetCannAttributeList(const int **list, size_t *count) {
  static const int attributes[] = {0, 1, 2};
  *list = attributes;
  *count = 3;
  return OK;
}

enum { CAPABILITY_CUBE_CORES = 0, CAPABILITY_VECTOR_CORES = 1, CAPABILITY_L2_BYTES = 2 };

API Status aclGetDeviceCapability(uint32_t device, int capability, int64_t *value) {
  (void)device;
  *value = capability == CAPABILITY_CUBE_CORES     ? CUBE_CORES
           : capability == CAPABILITY_VECTOR_CORES ? VECTOR_CORES
           : capability == CAPABILITY_L2_BYTES     ? 192L << 20
                                                   : 0;
  return OK;
}

enum { INFO_CUBE_CORES = 1, INFO_MEMORY_BYTES = 301 };

API Status aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
  (void)device;
  *value = attribute == INFO_MEMORY_BYTES ? (int64_t)device_capacity() : attribute == INFO_CUBE_CORES ? CUBE_CORES : 0;
  return OK;
}

API Status aclrtDeviceGetUuid(int32_t device, void *uuid) {
  memset(uuid, 0, 16);
  ((uint8_t *)uuid)[15] = (uint8_t)device;
  return OK;
}

API Status aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) {
  *logic = user;
  return OK;
}

/* ---- devices and contexts: a context is the number of its device, made a pointer ---- */

enum { CONTEXT_BASE = 0x1000 };

static __thread int chosen_device = -1;

int present_device(void) { return chosen_device < 0 ? 0 : chosen_device; }

static int device_count(void) {
  long count = knob_number("CANN_STUB_DEVICES", 2);
  return count > MAX_DEVICES ? MAX_DEVICES : (int)count;
}

API Status aclrtGetDeviceCount(uint32_t *count) {
  *count = (uint32_t)device_count();
  return OK;
}

API Status aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return INVALID_PARAMETER;
  trace("aclrtSetDevice(%d)", device);
  chosen_device = device;
  return OK;
}

API Status aclrtResetDevice(int32_t device) {
  (void)device;
  return OK;
}

API Status aclrtGetDevice(int32_t *device) {
  if (chosen_device < 0) return NO_CONTEXT;
  *device = chosen_device;
  return OK;
}

API Status aclrtGetCurrentContext(void **context) {
  *context = chosen_device < 0 ? NULL : (void *)(uintptr_t)(CONTEXT_BASE + chosen_device);
  return chosen_device < 0 ? NO_CONTEXT : OK;
}

API Status aclrtSetCurrentContext(void *context) {
  if (context) chosen_device = (int)((uintptr_t)context - CONTEXT_BASE);
  return OK;
}

API Status aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
  (void)device;
  if (flags) *flags = 0;
  *active = 1;
  return OK;
}

API Status aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
  *can = device != peer;
  return OK;
}

API Status aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
  (void)peer;
  (void)flags;
  return OK;
}

API Status aclrtDeviceGetBareTgid(int32_t *process) {
  *process = (int32_t)getpid();
  return OK;
}

API Status aclrtSynchronizeDevice(void) { return OK; }

API Status aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
  (void)milliseconds;
  return OK;
}

API Status aclrtGetDeviceUtilizationRate(int32_t device, int32_t *rates) {
  (void)device;
  memset(rates, 0, 4 * sizeof *rates);
  return OK;
}

API Status aclrtPeekAtLastError(int level) {
  (void)level;
  return OK;
}

API Status aclrtGetLastError(int level) {
  (void)level;
  return OK;
}

API Status aclrtDeviceTaskAbort(int32_t device, uint32_t timeout) {
  (void)device;
  (void)timeout;
  return OK;
}

API Status aclrtSetOpWaitTimeout(uint32_t timeout) {
  (void)timeout;
  return OK;
}

API Status aclrtSetOpExecuteTimeOut(uint32_t timeout) {
  (void)timeout;
  return OK;
}

API Status aclrtSetOpExecuteTimeOutV2(uint64_t timeout, uint64_t *actual) {
  *actual = timeout;
  return OK;
}

enum { RESOURCE_CUBE = 0 };

static uint32_t cores(int type) { return type == RESOURCE_CUBE ? CUBE_CORES : VECTOR_CORES; }

API Status aclrtGetDeviceResLimit(int32_t device, int type, uint32_t *value) {
  (void)device;
  *value = cores(type);
  return OK;
}

API Status aclrtGetStreamResLimit(void *stream, int type, uint32_t *value) {
  (void)stream;
  *value = cores(type);
  return OK;
}

API Status aclrtGetResInCurrentThread(int type, uint32_t *value) {
  *value = cores(type);
  return OK;
}

/* ---- overflow: torch_npu chooses the mode, the kernels of npu_simulator saturate and set the register ---- */

int overflow_register;
static int saturates;

enum { MODE_SATURATION = 0 };

API Status aclrtSetDeviceSatMode(int mode) {
  trace("aclrtSetDeviceSatMode(%s)", mode == MODE_SATURATION ? "saturation" : "inf and NaN");
  saturates = mode == MODE_SATURATION;
  return OK;
}

API int npu_simulator_saturates(void) { return saturates; }
API void npu_simulator_set_overflow(int value) { overflow_register = value; }
API int npu_simulator_get_overflow(void) { return overflow_register; }
