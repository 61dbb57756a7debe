/* Faults by environment. NC10D_EMULATED_FAULTS is a list, entries apart by commas:
 *
 *   [RANK/]FUNCTION@N=ACTION[:VALUE]     the Nth call (from 1; * for each) of FUNCTION, by that rank
 *
 * fail:R    return the ncclResult_t R, and do nothing
 * slow:MS   return late
 * delay:MS  the operation begins late on its stream
 * hang      the operation never goes on, until it is aborted
 * error:R   the same, and the communicator has the asynchronous error R
 * stuck     the call does not come back until the communicator is aborted
 * die       the process is gone
 *
 * The variable is read again at each call; counting begins anew when its text changes. */
#include "emulator.h"
#include <signal.h>
#include <time.h>

#define MOST_FAULTS 32

struct fault {
  int rank, nth, seen;
  long value;
  char function[48], action[16];
};

static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static struct fault faults[MOST_FAULTS];
static int count;
static char *text;

static void parse_one(char *entry) {
  struct fault fault = {.rank = -1};
  char nth[12], *slash = strchr(entry, '/');
  if (slash) fault.rank = atoi(entry), entry = slash + 1;
  int parts = sscanf(entry, "%47[^@]@%11[^=]=%15[^:]:%ld", fault.function, nth, fault.action, &fault.value);
  if (parts < 3 || count == MOST_FAULTS) {
    fprintf(stderr, "NC10D_EMULATED_FAULTS: can't read %s\n", entry);
    abort();
  }
  fault.nth = *nth == '*' ? 0 : atoi(nth);
  faults[count++] = fault;
}

static void parse(const char *now) {
  free(text);
  text = strdup(now);
  count = 0;
  char *copy = strdup(now), *rest;
  for (char *entry = strtok_r(copy, ",", &rest); entry; entry = strtok_r(NULL, ",", &rest)) parse_one(entry);
  free(copy);
}

static void sleep_milliseconds(long value) {
  struct timespec time = {value / 1000, value % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static bool act(const struct fault *fault, struct op *op, ncclResult_t *result) {
  if (!strcmp(fault->action, "die")) raise(SIGKILL);
  if (!strcmp(fault->action, "slow")) sleep_milliseconds(fault->value);
  if (op && !strcmp(fault->action, "delay")) op->delay = fault->value / 1e3;
  if (op && !strcmp(fault->action, "hang")) op->hang = 1;
  if (op && !strcmp(fault->action, "stuck")) op->stuck = 1;
  if (op && !strcmp(fault->action, "error")) op->error = (int)fault->value;
  if (strcmp(fault->action, "fail")) return false;
  *result = nccl_fail(NULL, (ncclResult_t)fault->value, "%s : a fault was asked for", fault->function);
  return true;
}

bool nccl_fault(const char *function, int rank, struct op *op, ncclResult_t *result) {
  const char *now = getenv("NC10D_EMULATED_FAULTS");
  if (!now) return false;
  struct fault due[MOST_FAULTS];
  int hits = 0;
  pthread_mutex_lock(&reading);
  if (!text || strcmp(text, now)) parse(now);
  for (int i = 0; i < count; i++) {
    struct fault *fault = &faults[i];
    if (strcmp(fault->function, function) || (fault->rank >= 0 && fault->rank != rank)) continue;
    fault->seen++;
    if (!fault->nth || fault->seen == fault->nth) due[hits++] = *fault;
  }
  pthread_mutex_unlock(&reading);
  bool returns = false;
  for (int i = 0; i < hits; i++) returns |= act(&due[i], op, result);
  return returns;
}
