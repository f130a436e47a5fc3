/*
 * What holds of every frame before its fields are looked at. A walk over msgpack, no values.
 *
 * msgpack-c is more lenient: it takes keys twice, broken UTF-8 and extensions, and makes room for what a length says.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

#define MAX_DEPTH 32 /* also the most that msgpack-c unpacks (MSGPACK_EMBED_STACK_SIZE) */
#define MAX_ITEMS 16384
#define MAX_KEY_BYTES 256

typedef struct walk {
  const uint8_t *at, *end;
  int num_items;
  const char *fault;
} walk;

typedef struct key {
  const uint8_t *data;
  size_t size;
} key;

static bool value(walk *w, int depth, bool may_be_bytes);

static bool fail(walk *w, const char *fault) {
  w->fault = fault;
  return false;
}

static bool skip(walk *w, size_t size, const uint8_t **start) {
  *start = w->at;
  if (size > (size_t)(w->end - w->at)) return fail(w, "it ends early");
  w->at += size;
  return true;
}

/* A big-endian number of `width` bytes. */
static bool number(walk *w, int width, uint64_t *result) {
  const uint8_t *start;
  if (!skip(w, (size_t)width, &start)) return false;
  *result = 0;
  for (int place = 0; place < width; place++) *result = *result << 8 | start[place];
  return true;
}

static bool is_utf8(const uint8_t *at, size_t size) {
  const uint8_t *end = at + size;
  while (at < end) {
    uint32_t first = *at++;
    if (first < 0x80) continue;
    int more = first >= 0xf0 ? 3 : first >= 0xe0 ? 2 : 1;
    if (first < 0xc2 || first > 0xf4 || end - at < more) return false;
    uint32_t point = first & (0x3fu >> more);
    for (int place = 0; place < more; place++) {
      if ((*at & 0xc0) != 0x80) return false;
      point = point << 6 | (*at++ & 0x3f);
    }
    bool is_long = (more == 2 && point < 0x800) || (more == 3 && point < 0x10000);
    if (is_long || point > 0x10ffff || (point >= 0xd800 && point <= 0xdfff)) return false;
  }
  return true;
}

static bool text(walk *w, uint8_t byte, key *result) {
  uint64_t size = byte & 0x1f;
  if (byte >= 0xd9 && !number(w, 1 << (byte - 0xd9), &size)) return false;
  if (!skip(w, size, &result->data)) return false;
  result->size = size;
  return is_utf8(result->data, size) || fail(w, "text is no UTF-8");
}

static bool is_text(uint8_t byte) { return (byte & 0xe0) == 0xa0 || (byte >= 0xd9 && byte <= 0xdb); }

static int compare_keys(const void *left, const void *right) {
  const key *a = left, *b = right;
  if (a->size != b->size) return a->size < b->size ? -1 : 1;
  return memcmp(a->data, b->data, a->size);
}

static bool count_item(walk *w) { return ++w->num_items <= MAX_ITEMS || fail(w, "too many values"); }

static bool map_key(walk *w, key *result) {
  const uint8_t *byte;
  if (!count_item(w) || !skip(w, 1, &byte)) return false;
  if (!is_text(*byte)) return fail(w, "a key is no text");
  if (!text(w, *byte, result)) return false;
  return result->size <= MAX_KEY_BYTES || fail(w, "a key is too long");
}

static bool map(walk *w, size_t size, int depth) {
  if (size > MAX_ITEMS) return fail(w, "too many values");
  key *keys = malloc((size + 1) * sizeof *keys);
  if (keys == NULL) return fail(w, "no memory");
  bool is_good = true;
  for (size_t place = 0; is_good && place < size; place++) {
    is_good = map_key(w, &keys[place]) && value(w, depth + 1, depth == 0);
  }
  if (is_good && size > 1) {
    qsort(keys, size, sizeof *keys, compare_keys);
    for (size_t place = 1; is_good && place < size; place++) {
      if (compare_keys(&keys[place - 1], &keys[place]) == 0) is_good = fail(w, "a key is there twice");
    }
  }
  free(keys);
  return is_good;
}

/* A map or an array with `size` elements. */
static bool branch(walk *w, uint64_t size, int depth, bool is_map) {
  if (depth >= MAX_DEPTH) return fail(w, "too deep");
  if ((is_map ? 2 * size : size) > (size_t)(w->end - w->at)) return fail(w, "it ends early");
  if (is_map) return map(w, size, depth);
  for (uint64_t place = 0; place < size; place++) {
    if (!value(w, depth + 1, false)) return false;
  }
  return true;
}

static bool finite_number(walk *w, int width) {
  uint64_t bits;
  if (!number(w, width, &bits)) return false;
  uint64_t exponent = width == 4 ? bits >> 23 & 0xff : bits >> 52 & 0x7ff;
  return exponent != (width == 4 ? 0xffu : 0x7ffu) || fail(w, "a number is not finite");
}

static bool value(walk *w, int depth, bool may_be_bytes) {
  const uint8_t *start;
  uint64_t size;
  key ignored;
  if (!count_item(w) || !skip(w, 1, &start)) return false;
  uint8_t byte = *start;
  if (byte < 0x80 || byte >= 0xe0) return true;
  if (byte < 0xa0) return branch(w, byte & 0x0f, depth, byte < 0x90);
  if (is_text(byte)) return text(w, byte, &ignored);
  switch (byte) {
    case 0xc0: /* nil, false, true */
    case 0xc2:
    case 0xc3:
      return true;
    case 0xc4: /* bytes */
    case 0xc5:
    case 0xc6:
      if (!may_be_bytes) return fail(w, "bytes are no field of the message itself");
      return number(w, 1 << (byte - 0xc4), &size) && skip(w, size, &start);
    case 0xca:
    case 0xcb:
      return finite_number(w, byte == 0xca ? 4 : 8);
    case 0xcf:
      if (!number(w, 8, &size)) return false;
      return size >> 63 == 0 || fail(w, "a number of 64 bits without a sign");
    case 0xcc: /* other whole numbers */
    case 0xcd:
    case 0xce:
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3:
      return skip(w, (size_t)1 << (byte & 3), &start);
    case 0xdc: /* arrays */
    case 0xdd:
      return number(w, 2 << (byte - 0xdc), &size) && branch(w, size, depth, false);
    case 0xde: /* maps */
    case 0xdf:
      return number(w, 2 << (byte - 0xde), &size) && branch(w, size, depth, true);
    default:
      return fail(w, "an extension, or a byte that msgpack does not have");
  }
}

const char *di_check_structure(const uint8_t *frame, size_t size) {
  walk w = {frame, frame + size, 0, NULL};
  if (size == 0 || !((*frame & 0xf0) == 0x80 || *frame == 0xde || *frame == 0xdf)) return "not a map";
  if (!value(&w, 0, false)) return w.fault;
  return w.at == w.end ? NULL : "bytes follow the message";
}
