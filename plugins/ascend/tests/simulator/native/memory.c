/* Device memory is host memory with an accounting of its own; addresses are therefore readable by the kernels of npu_simulator. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { ALIGNMENT = 512, BUCKETS = 4096 };
enum kind { DEVICE_MEMORY = 1, HOST_MEMORY = 2, ADDRESS_SPACE = 3 };

struct block {
  void *address;
  size_t bytes;
  int device;
  enum kind kind;
  struct block *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks[BUCKETS];
static size_t used_bytes[MAX_DEVICES];

size_t device_capacity(void) { return (size_t)knob_number("CANN_STUB_MEM_MB", 65536) << 20; }

size_t used(int device) {
  pthread_mutex_lock(&lock);
  size_t bytes = used_bytes[device];
  pthread_mutex_unlock(&lock);
  return bytes;
}

int reserve(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  int fits = used_bytes[device] + bytes <= device_capacity();
  if (fits) used_bytes[device] += bytes;
  pthread_mutex_unlock(&lock);
  return fits;
}

void release(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  used_bytes[device] -= bytes;
  pthread_mutex_unlock(&lock);
}

static struct block **bucket(const void *address) { return &blocks[((uintptr_t)address >> 9) % BUCKETS]; }

static void remember(void *address, size_t bytes, int device, enum kind kind) {
  struct block *block = malloc(sizeof *block);
  *block = (struct block){address, bytes, device, kind, NULL};
  pthread_mutex_lock(&lock);
  block->next = *bucket(address);
  *bucket(address) = block;
  pthread_mutex_unlock(&lock);
}

static void forget(void *address) {
  pthread_mutex_lock(&lock);
  struct block **link = bucket(address);
  while (*link && (*link)->address != address) link = &(*link)->next;
  struct block *found = *link;
  if (found) {
    *link = found->next;
    if (found->kind == DEVICE_MEMORY) used_bytes[found->device] -= found->bytes;
  }
  pthread_mutex_unlock(&lock);
  free(found);
}

static void *allocate(size_t bytes) {
  size_t rounded = (bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
  return aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT);
}

/* ---- plain allocations ---- */

API Status aclrtMalloc(void **address, size_t bytes, int policy) {
  (void)policy;
  int device = present_device();
  if (!reserve(device, bytes)) return OUT_OF_MEMORY;
  *address = allocate(bytes);
  if (!*address) {
    release(device, bytes);
    return OUT_OF_MEMORY;
  }
  remember(*address, bytes, device, DEVICE_MEMORY);
  trace("aclrtMalloc(%zu) on device %d", bytes, device);
  return OK;
}

API Status aclrtMallocAlign32(void **address, size_t bytes, int policy) { return aclrtMalloc(address, bytes, policy); }

API Status aclrtFree(void *address) {
  forget(address);
  free(address);
  return OK;
}

API Status aclrtMallocHost(void **address, size_t bytes) {
  *address = allocate(bytes);
  if (!*address) return OUT_OF_MEMORY;
  remember(*address, bytes, 0, HOST_MEMORY);
  return OK;
}

API Status aclrtMallocHostWithCfg(void **address, uint64_t bytes, void *configuration) {
  (void)configuration;
  return aclrtMallocHost(address, bytes);
}

API Status aclrtFreeHost(void *address) { return aclrtFree(address); }

API Status aclrtHostRegister(void *address, uint64_t bytes, int type, void **device_address) {
  (void)bytes;
  (void)type;
  *device_address = address;
  return OK;
}

API Status aclrtHostUnregister(void *address) {
  (void)address;
  return OK;
}

/* ---- copies ---- */

API Status aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int kind) {
  (void)kind;
  if (bytes > room) return INVALID_PARAMETER;
  memmove(to, from, bytes);
  return OK;
}

API Status aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t bytes, int kind, void *stream) {
  (void)stream;
  return aclrtMemcpy(to, room, from, bytes, kind);
}

API Status aclrtMemset(void *address, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return INVALID_PARAMETER;
  memset(address, value, bytes);
  return OK;
}

API Status aclrtMemsetAsync(void *address, size_t room, int32_t value, size_t bytes, void *stream) {
  (void)stream;
  return aclrtMemset(address, room, value, bytes);
}

/* ---- questions ---- */

API Status aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total_bytes) {
  (void)attribute;
  *total_bytes = device_capacity();
  *free_bytes = *total_bytes - used(present_device());
  return OK;
}

enum { LOCATION_HOST = 0, LOCATION_DEVICE = 1, LOCATION_UNREGISTERED = 2 };

struct pointer_attributes {
  uint32_t id;
  int type;
  uint32_t page_bytes;
  uint32_t reserved[4];
};

API Status aclrtPointerGetAttributes(const void *pointer, struct pointer_attributes *attributes) {
  memset(attributes, 0, sizeof *attributes);
  attributes->type = LOCATION_UNREGISTERED;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < BUCKETS; i++)
    for (struct block *block = blocks[i]; block; block = block->next)
      if ((const char *)pointer >= (char *)block->address && (const char *)pointer < (char *)block->address + block->bytes) {
        attributes->type = block->kind == HOST_MEMORY ? LOCATION_HOST : LOCATION_DEVICE;
        attributes->id = (uint32_t)block->device;
      }
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ---- virtual memory, for expandable segments: address space is reserved without access, mapping makes it accessible ---- */

struct physical {
  size_t bytes;
  int device;
};

API Status aclrtReserveMemAddress(void **address, size_t bytes, size_t alignment, void *hint, uint64_t flags) {
  (void)alignment;
  (void)hint;
  (void)flags;
  void *space = mmap(NULL, bytes + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) return OUT_OF_MEMORY;
  *address = space;
  remember(space, bytes, 0, ADDRESS_SPACE);
  return OK;
}

API Status aclrtReleaseMemAddress(void *address) {
  (void)address;
  return OK;
}

API Status aclrtMallocPhysical(void **handle, size_t bytes, const void *properties, uint64_t flags) {
  (void)properties;
  (void)flags;
  int device = present_device();
  if (!reserve(device, bytes)) return OUT_OF_MEMORY;
  struct physical *physical = malloc(sizeof *physical);
  *physical = (struct physical){bytes, device};
  *handle = physical;
  return OK;
}

API Status aclrtFreePhysical(void *handle) {
  struct physical *physical = handle;
  release(physical->device, physical->bytes);
  free(physical);
  return OK;
}

API Status aclrtMapMem(void *address, size_t bytes, size_t offset, void *handle, uint64_t flags) {
  (void)offset;
  (void)handle;
  (void)flags;
  return mprotect(address, bytes, PROT_READ | PROT_WRITE) ? OUT_OF_MEMORY : OK;
}

API Status aclrtUnmapMem(void *address) {
  (void)address;
  return OK;
}
