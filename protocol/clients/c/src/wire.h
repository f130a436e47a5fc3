/* Bytes to checked messages and back. Knows nothing of sockets or of what a message does. */
#ifndef DEEPINFER_WIRE_H
#define DEEPINFER_WIRE_H

#include <msgpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DI_MAX_FRAME_BYTES (4u * 1024 * 1024)

typedef enum di_verdict { DI_V_OK, DI_V_DECODE, DI_V_TOO_LARGE, DI_V_UNKNOWN_KIND } di_verdict;

typedef enum di_sender { DI_FROM_CLIENT, DI_FROM_SERVER } di_sender;

/* What has gone wrong, and in which field. */
typedef struct di_fault {
  char field[256];
  const char *text;
} di_fault;

/* A message whose fields are of their types and within their bounds. */
typedef struct di_message {
  msgpack_unpacked unpacked; /* `unpacked.data` is the map */
  const char *kind;          /* one of the tables' names */
} di_message;

/* docs/wire.md, "Encoding": what holds of every frame. NULL, or what is wrong. */
const char *di_check_structure(const uint8_t *frame, size_t size);

/* The name that docs/wire.md has for a verdict. */
const char *di_verdict_name(di_verdict verdict);

/* After DI_V_OK `message` is freed by di_message_free. */
di_verdict di_decode(di_sender sender, const uint8_t *frame, size_t size, di_message *message, di_fault *fault);
void di_message_free(di_message *message);

/* The message again: fields in the order of the tables, no defaults, shortest encodings, float64. */
void di_write(di_sender sender, const di_message *message, msgpack_packer *packer);

/* A field, NULL where it is absent or nil. */
const msgpack_object *di_find(const msgpack_object *map, const char *name);
/* Whole number; `fallback` where the field is absent. */
int64_t di_int(const msgpack_object *map, const char *name, int64_t fallback);
bool di_bool(const msgpack_object *map, const char *name);
/* Copies text with its NUL, cut to `size`; empty where the field is absent. */
void di_text(const msgpack_object *map, const char *name, char *target, size_t size);
/* int32, little-endian. */
int32_t di_int32(const char *bytes);
/* Of a number, whole or not. */
double di_double(const msgpack_object *value);

void di_pack_text(msgpack_packer *packer, const char *text);

#endif
