/* User objects: what a library ties to graphs, so that it learns when the last of them is gone. A
 * graph that was captured and each that was instantiated from it hold a reference of their own. */
#include "emulator.h"

struct CUuserObject_st {
  unsigned references;
  CUhostFn destroy;
  void *data;
};

struct held { /* one reference that a graph has */
  struct held *next;
  CUuserObject object;
};

CUresult cuUserObjectCreate(CUuserObject *object, void *data, CUhostFn destroy, unsigned references, unsigned flags) {
  REQUIRE(object && destroy && references && flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CUDA_ERROR_INVALID_VALUE);
  *object = malloc(sizeof **object);
  **object = (struct CUuserObject_st){references, destroy, data};
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRetain(CUuserObject object, unsigned count) {
  REQUIRE(object && count, CUDA_ERROR_INVALID_VALUE);
  __atomic_fetch_add(&object->references, count, __ATOMIC_ACQ_REL);
  return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned count) {
  REQUIRE(object && count, CUDA_ERROR_INVALID_VALUE);
  if (__atomic_sub_fetch(&object->references, count, __ATOMIC_ACQ_REL)) return CUDA_SUCCESS;
  object->destroy(object->data);
  free(object);
  return CUDA_SUCCESS;
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned count, unsigned flags) {
  REQUIRE(graph && object && count, CUDA_ERROR_INVALID_VALUE);
  if (!(flags & CU_GRAPH_USER_OBJECT_MOVE)) cuUserObjectRetain(object, count);
  pthread_mutex_lock(&cuemu_lock);
  for (unsigned i = 0; i < count; i++) {
    struct held *held = malloc(sizeof *held);
    *held = (struct held){graph->held, object};
    graph->held = held;
  }
  pthread_mutex_unlock(&cuemu_lock);
  return CUDA_SUCCESS;
}

void cuemu_keep_objects(CUgraph graph, CUgraph other) {
  for (struct held *held = other->held; held; held = held->next) cuGraphRetainUserObject(graph, held->object, 1, 0);
}

/* Without the lock: the last reference calls what its maker has given it. */
void cuemu_drop_objects(CUgraph graph) {
  pthread_mutex_lock(&cuemu_lock);
  struct held *held = graph->held;
  graph->held = NULL;
  pthread_mutex_unlock(&cuemu_lock);
  for (struct held *next; held; held = next) {
    next = held->next;
    cuUserObjectRelease(held->object, 1);
    free(held);
  }
}
