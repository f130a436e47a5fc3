/* The messages of the client wire: the tables of docs/wire.md, what checks them, and what writes them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "wire.h"

typedef enum type {
  WHOLE,   /* least to most */
  NUMBER,
  BOOLEAN,
  TEXT,    /* at most `most` characters */
  NAME,    /* least to most of A-Z a-z 0-9 _ - */
  IDS,     /* int32 in bytes */
  REASON,
  TRACEPARENT,
  STRUCT,  /* `inner` */
  MAPS,    /* least to most of them */
  LOGPROBS,
  WHOLE_OR_TEXT,
  NAME_OR_MAP,
  WHOLES,
  TEXTS,   /* also one text */
  WORDS,   /* texts and arrays of whole numbers */
  LIST,    /* of texts */
  SCHEMA,  /* text, a map or a boolean */
  BIASES   /* a map of numbers */
} type;

typedef enum fallback {
  REQUIRED,
  NIL,     /* nil is the default */
  VALUE,   /* `value` is */
  EMPTY,   /* no text, no bytes, no elements */
  EMPTY_OR_NIL, /* empty; may be nil */
  VALUE_OR_NIL, /* `value`; may be nil */
  WRITTEN  /* an empty map, which is written all the same */
} fallback;

typedef struct field {
  const char *name;
  type type;
  fallback fallback;
  int64_t least, most;
  double value;
  const struct field *inner;
} field;

typedef struct kind {
  const char *name;
  const field *fields;
  bool is_strict; /* a field that is not known is refused */
} kind;

#define COUNT 0, INT32_MAX
#define INT53 0, 9007199254740991
#define INT64 INT64_MIN, INT64_MAX
#define VERSION 1, 65535
#define ID {"id", NAME, REQUIRED, 1, 64}
#define ALL 0, DI_MAX_FRAME_BYTES

static const field sampling[] = {
    {"max_tokens", WHOLE, NIL, INT64},
    {"min_tokens", WHOLE, VALUE, INT64},
    {"temperature", NUMBER, VALUE, .value = 1},
    {"top_p", NUMBER, VALUE, .value = 1},
    {"top_k", WHOLE, VALUE, INT64},
    {"min_p", NUMBER, VALUE},
    {"repetition_penalty", NUMBER, VALUE, .value = 1},
    {"presence_penalty", NUMBER, VALUE},
    {"frequency_penalty", NUMBER, VALUE},
    {"logit_bias", BIASES, NIL},
    {"allowed_token_ids", WHOLES, NIL},
    {"banned_token_ids", WHOLES, NIL},
    {"bad_words", WORDS, NIL},
    {"json_schema", SCHEMA, NIL},
    {"regex", TEXT, NIL, ALL},
    {"choice", LIST, NIL},
    {"grammar", TEXT, NIL, ALL},
    {"n", WHOLE, VALUE, INT64, .value = 1},
    {"stop", TEXTS, EMPTY_OR_NIL},
    {"stop_token_ids", WHOLES, EMPTY_OR_NIL},
    {"include_stop_str_in_output", BOOLEAN, VALUE},
    {"ignore_eos", BOOLEAN, VALUE},
    {"logprobs", WHOLE, NIL, INT64},
    {"prompt_logprobs", WHOLE, NIL, INT64},
    {"seq_seed", WHOLE, NIL, INT64},
    {"skip_special_tokens", BOOLEAN, VALUE, .value = 1},
    {"skip_reading_prefix_cache", BOOLEAN, VALUE_OR_NIL},
    {"detokenize", BOOLEAN, VALUE, .value = 1},
    {0}};
static const field limits[] = {
    {"max_frame_bytes", WHOLE, REQUIRED, COUNT},
    {"max_streams", WHOLE, REQUIRED, COUNT},
    {"retention_ms", WHOLE, REQUIRED, COUNT},
    {"max_unacked_tokens", WHOLE, REQUIRED, COUNT},
    {"ping_ms", WHOLE, REQUIRED, COUNT},
    {"idle_ms", WHOLE, REQUIRED, COUNT},
    {0}};
static const field usage[] = {
    {"prompt_tokens", WHOLE, VALUE, COUNT},
    {"cached_tokens", WHOLE, VALUE, COUNT},
    {"generated_tokens", WHOLE, VALUE, COUNT},
    {"preemptions", WHOLE, VALUE, COUNT},
    {0}};
static const field timings[] = {
    {"first_token_us", WHOLE, VALUE, INT53}, {"total_us", WHOLE, VALUE, INT53}, {0}};

static const field hello[] = {
    {"min_version", WHOLE, REQUIRED, VERSION},
    {"max_version", WHOLE, REQUIRED, VERSION},
    {"session", NAME, REQUIRED, 16, 64},
    {"client", TEXT, EMPTY, 0, 256},
    {"token", TEXT, EMPTY, 0, 256},
    {0}};
static const field submit[] = {
    ID,
    {"prompt", TEXT, NIL, ALL},
    {"token_ids", IDS, NIL},
    {"messages", MAPS, NIL, 1, 4096},
    {"sampling", STRUCT, WRITTEN, .inner = sampling},
    {"thinking", BOOLEAN, NIL},
    {"reasoning_effort", TEXT, NIL, 0, 256},
    {"tools", MAPS, NIL, 0, 1024},
    {"tool_choice", NAME_OR_MAP, NIL, 0, 256},
    {"priority", WHOLE, VALUE, -1000000, 1000000},
    {"queue_timeout_ms", WHOLE, NIL, COUNT},
    {"timeout_ms", WHOLE, NIL, COUNT},
    {"resumable", BOOLEAN, VALUE},
    {"credit", WHOLE, VALUE, COUNT, .value = 1024},
    {"traceparent", TRACEPARENT, NIL},
    {0}};
static const field cancel[] = {ID, {0}};
static const field credit[] = {ID, {"limit", WHOLE, REQUIRED, COUNT}, {"ack", WHOLE, VALUE, COUNT}, {0}};
static const field resume[] = {ID, {"next", WHOLE, REQUIRED, COUNT}, {"limit", WHOLE, REQUIRED, COUNT}, {0}};
static const field ping[] = {{"nonce", WHOLE, VALUE, INT53}, {0}};
static const field bye[] = {{0}};

static const field welcome[] = {
    {"version", WHOLE, REQUIRED, VERSION},
    {"engine", TEXT, REQUIRED, 0, 256},
    {"server", TEXT, REQUIRED, 0, 256},
    {"model", TEXT, REQUIRED, 0, 256},
    {"vocab_size", WHOLE, REQUIRED, COUNT},
    {"max_length", WHOLE, REQUIRED, COUNT},
    {"limits", STRUCT, REQUIRED, .inner = limits},
    {"has_tokenizer", BOOLEAN, VALUE},
    {"has_chat", BOOLEAN, VALUE},
    {0}};
static const field reject[] = {
    {"code", WHOLE, REQUIRED, COUNT},
    {"name", TEXT, REQUIRED, 0, 256},
    {"text", TEXT, REQUIRED, 0, 512},
    {"min_version", WHOLE, REQUIRED, VERSION},
    {"max_version", WHOLE, REQUIRED, VERSION},
    {"retryable", BOOLEAN, VALUE},
    {"retry_after_ms", WHOLE, VALUE, COUNT},
    {0}};
static const field delta[] = {
    ID,
    {"seq", WHOLE, REQUIRED, COUNT},
    {"sample", WHOLE, VALUE, 0, 127},
    {"index", WHOLE, VALUE, COUNT},
    {"token_ids", IDS, EMPTY},
    {"text", TEXT, EMPTY, ALL},
    {"logprobs", LOGPROBS, NIL},
    {"reason", REASON, NIL},
    {"stop", WHOLE_OR_TEXT, NIL, COUNT},
    {0}};
static const field finish[] = {
    ID,
    {"reason", REASON, REQUIRED},
    {"seq", WHOLE, VALUE, COUNT},
    {"usage", STRUCT, WRITTEN, .inner = usage},
    {"timings", STRUCT, WRITTEN, .inner = timings},
    {0}};
static const field error[] = {
    {"code", WHOLE, REQUIRED, COUNT},
    {"name", TEXT, REQUIRED, 0, 256},
    {"text", TEXT, REQUIRED, 0, 512},
    {"id", NAME, EMPTY, 0, 64},
    {"seq", WHOLE, VALUE, COUNT},
    {"retryable", BOOLEAN, VALUE},
    {"retry_after_ms", WHOLE, VALUE, COUNT},
    {"field", TEXT, EMPTY, 0, 256},
    {"detail", TEXT, EMPTY, 0, 512},
    {0}};
static const field pong[] = {
    {"nonce", WHOLE, VALUE, INT53},
    {"steps", WHOLE, VALUE, INT53},
    {"running", WHOLE, VALUE, COUNT},
    {"waiting", WHOLE, VALUE, COUNT},
    {0}};
static const field goaway[] = {{"deadline_ms", WHOLE, VALUE, COUNT}, {0}};

static const kind kinds[2][8] = {
    [DI_FROM_CLIENT] = {{"hello", hello, false},
                        {"submit", submit, true},
                        {"cancel", cancel, true},
                        {"credit", credit, true},
                        {"resume", resume, true},
                        {"ping", ping, true},
                        {"bye", bye, true},
                        {0}},
    [DI_FROM_SERVER] = {{"welcome", welcome, false},
                        {"reject", reject, false},
                        {"delta", delta, false},
                        {"finish", finish, false},
                        {"error", error, false},
                        {"pong", pong, false},
                        {"goaway", goaway, false},
                        {0}}};

static const char *const reasons[] = {"stop", "length", "abort", "queue_timeout", "timeout", "slow_consumer", NULL};

/* ---- looking at values */

static bool is_word(const msgpack_object *value, const char *word) {
  return value->type == MSGPACK_OBJECT_STR && value->via.str.size == strlen(word) &&
         memcmp(value->via.str.ptr, word, value->via.str.size) == 0;
}

static bool is_whole(const msgpack_object *value, int64_t least, int64_t most) {
  if (value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER) return value->via.i64 >= least && value->via.i64 <= most;
  if (value->type != MSGPACK_OBJECT_POSITIVE_INTEGER || value->via.u64 > INT64_MAX) return false;
  return (int64_t)value->via.u64 >= least && (int64_t)value->via.u64 <= most;
}

static bool is_float(const msgpack_object *value) {
  return value->type == MSGPACK_OBJECT_FLOAT32 || value->type == MSGPACK_OBJECT_FLOAT64;
}

static bool is_number(const msgpack_object *value) { return is_float(value) || is_whole(value, INT64); }

/* Characters, that is code points; it is UTF-8. */
static int64_t num_characters(const msgpack_object_str *text) {
  int64_t number = 0;
  for (uint32_t place = 0; place < text->size; place++) number += (text->ptr[place] & 0xc0) != 0x80;
  return number;
}

static bool is_text_of(const msgpack_object *value, int64_t most) {
  return value->type == MSGPACK_OBJECT_STR && num_characters(&value->via.str) <= most;
}

static bool is_name(const msgpack_object *value, int64_t least, int64_t most) {
  static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
  if (value->type != MSGPACK_OBJECT_STR || value->via.str.size < least || value->via.str.size > most) return false;
  for (uint32_t place = 0; place < value->via.str.size; place++) {
    char letter = value->via.str.ptr[place];
    if (letter == 0 || strchr(letters, letter) == NULL) return false;
  }
  return true;
}

/* Two, 32, 16 and two hexadecimal digits. */
static bool is_traceparent(const msgpack_object *value) {
  static const char form[] = "00-00000000000000000000000000000000-0000000000000000-00";
  if (value->type != MSGPACK_OBJECT_STR || value->via.str.size != sizeof form - 1) return false;
  for (uint32_t place = 0; place < value->via.str.size; place++) {
    char letter = value->via.str.ptr[place];
    bool is_digit = letter != 0 && strchr("0123456789abcdef", letter) != NULL;
    if (form[place] == '-' ? letter != '-' : !is_digit) return false;
  }
  return true;
}

static bool is_ids(const msgpack_object *value) {
  if (value->type != MSGPACK_OBJECT_BIN || value->via.bin.size % 4 != 0) return false;
  for (uint32_t place = 0; place < value->via.bin.size; place += 4) {
    if (di_int32(value->via.bin.ptr + place) < 0) return false;
  }
  return true;
}

static bool is_one_of(const msgpack_object *value, const char *const *words) {
  while (*words != NULL && !is_word(value, *words)) words++;
  return *words != NULL;
}

static bool is_map(const msgpack_object *value) { return value->type == MSGPACK_OBJECT_MAP; }

static bool is_array(const msgpack_object *value, int64_t least, int64_t most) {
  return value->type == MSGPACK_OBJECT_ARRAY && value->via.array.size >= least && value->via.array.size <= most;
}

static bool is_texts(const msgpack_object *value) {
  if (!is_array(value, ALL)) return value->type == MSGPACK_OBJECT_STR;
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    if (value->via.array.ptr[place].type != MSGPACK_OBJECT_STR) return false;
  }
  return true;
}

static bool is_wholes(const msgpack_object *value) {
  if (!is_array(value, ALL)) return false;
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    if (!is_whole(&value->via.array.ptr[place], INT64)) return false;
  }
  return true;
}

static bool is_words(const msgpack_object *value) {
  if (!is_array(value, ALL)) return false;
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    const msgpack_object *word = &value->via.array.ptr[place];
    if (word->type != MSGPACK_OBJECT_STR && !is_wholes(word)) return false;
  }
  return true;
}

static bool is_maps(const msgpack_object *value, int64_t least, int64_t most) {
  if (!is_array(value, least, most)) return false;
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    if (!is_map(&value->via.array.ptr[place])) return false;
  }
  return true;
}

static bool is_biases(const msgpack_object *value) {
  if (!is_map(value)) return false;
  for (uint32_t place = 0; place < value->via.map.size; place++) {
    if (!is_number(&value->via.map.ptr[place].val)) return false;
  }
  return true;
}

static bool is_top(const msgpack_object *value) {
  if (!is_array(value, 0, 20)) return false;
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    const msgpack_object *entry = &value->via.array.ptr[place];
    if (!is_array(entry, 2, 2) || !is_whole(&entry->via.array.ptr[0], COUNT)) return false;
    if (!is_number(&entry->via.array.ptr[1])) return false;
  }
  return true;
}

/* Later versions may put more behind the four. */
static bool is_logprobs(const msgpack_object *value) {
  if (!is_array(value, ALL)) return false;
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    const msgpack_object *entry = &value->via.array.ptr[place];
    if (!is_array(entry, 4, DI_MAX_FRAME_BYTES)) return false;
    const msgpack_object *parts = entry->via.array.ptr;
    if (!is_whole(&parts[0], COUNT) || !is_number(&parts[1]) || !is_whole(&parts[2], COUNT) || !is_top(&parts[3])) {
      return false;
    }
  }
  return true;
}

static bool is_known(const field *fields, const msgpack_object *name) {
  while (fields->name != NULL && !is_word(name, fields->name)) fields++;
  return fields->name != NULL;
}

/* ---- checking */

static bool fail(di_fault *fault, const char *path, const char *name, const char *text) {
  snprintf(fault->field, sizeof fault->field, "%s%s", path, name);
  fault->text = text;
  return false;
}

static bool check_fields(const field *fields, const msgpack_object *map, bool is_strict, const char *path,
                         di_fault *fault);

static bool may_be_nil(const field *field) {
  return field->fallback == NIL || field->fallback == EMPTY_OR_NIL || field->fallback == VALUE_OR_NIL;
}

static bool is_of_type(const field *field, const msgpack_object *value) {
  switch (field->type) {
    case WHOLE:
      return is_whole(value, field->least, field->most);
    case NUMBER:
      return is_number(value);
    case BOOLEAN:
      return value->type == MSGPACK_OBJECT_BOOLEAN;
    case TEXT:
      return is_text_of(value, field->most);
    case NAME:
      return is_name(value, field->least, field->most);
    case IDS:
      return is_ids(value);
    case REASON:
      return is_one_of(value, reasons);
    case TRACEPARENT:
      return is_traceparent(value);
    case STRUCT:
      return is_map(value);
    case MAPS:
      return is_maps(value, field->least, field->most);
    case LOGPROBS:
      return is_logprobs(value);
    case WHOLE_OR_TEXT:
      return value->type == MSGPACK_OBJECT_STR || is_whole(value, field->least, field->most);
    case NAME_OR_MAP:
      return is_map(value) || is_text_of(value, field->most);
    case WHOLES:
      return is_wholes(value);
    case TEXTS:
      return is_texts(value);
    case WORDS:
      return is_words(value);
    case LIST:
      return value->type != MSGPACK_OBJECT_STR && is_texts(value);
    case SCHEMA:
      return value->type == MSGPACK_OBJECT_STR || value->type == MSGPACK_OBJECT_BOOLEAN || is_map(value);
    case BIASES:
      return is_biases(value);
  }
  return false;
}

static const msgpack_object *find(const msgpack_object *map, const char *name) {
  for (uint32_t place = 0; place < map->via.map.size; place++) {
    if (is_word(&map->via.map.ptr[place].key, name)) return &map->via.map.ptr[place].val;
  }
  return NULL;
}

static bool check_field(const field *field, const msgpack_object *value, bool is_strict, const char *path,
                        di_fault *fault) {
  if (value == NULL) return field->fallback != REQUIRED || fail(fault, path, field->name, "it is missing");
  if (value->type == MSGPACK_OBJECT_NIL && may_be_nil(field)) return true;
  if (!is_of_type(field, value)) {
    return fail(fault, path, field->name, "it is of the wrong type, or out of its bounds");
  }
  if (field->type != STRUCT) return true;
  char inner[64];
  snprintf(inner, sizeof inner, "%s.", field->name);
  return check_fields(field->inner, value, is_strict, inner, fault);
}

static bool check_fields(const field *fields, const msgpack_object *map, bool is_strict, const char *path,
                         di_fault *fault) {
  for (const field *field = fields; field->name != NULL; field++) {
    if (!check_field(field, find(map, field->name), is_strict, path, fault)) return false;
  }
  for (uint32_t place = 0; is_strict && place < map->via.map.size; place++) {
    const msgpack_object *name = &map->via.map.ptr[place].key;
    if (!is_known(fields, name) && !(*path == 0 && is_word(name, "kind"))) {
      char text[64];
      snprintf(text, sizeof text, "%.*s", (int)name->via.str.size, name->via.str.ptr);
      return fail(fault, path, text, "there is no such field");
    }
  }
  return true;
}

/* What holds between fields. */
static bool check_whole(const kind *kind, const msgpack_object *map, di_fault *fault) {
  if (kind->fields == hello) {
    return di_int(map, "min_version", 1) <= di_int(map, "max_version", 1) ||
           fail(fault, "", "min_version", "the lowest version is above the highest");
  }
  if (kind->fields == submit) {
    int given = (di_find(map, "prompt") != NULL) + (di_find(map, "token_ids") != NULL) +
                (di_find(map, "messages") != NULL);
    return given == 1 || fail(fault, "", "prompt", "exactly one of prompt, token_ids and messages is expected");
  }
  const msgpack_object *ids = di_find(map, "token_ids"), *logprobs = di_find(map, "logprobs");
  if (kind->fields == delta && logprobs != NULL) {
    uint32_t num_ids = ids == NULL ? 0 : ids->via.bin.size / 4;
    return num_ids == logprobs->via.array.size ||
           fail(fault, "", "logprobs", "tokens and logprobs differ in number");
  }
  return true;
}

di_verdict di_decode(di_sender sender, const uint8_t *frame, size_t size, di_message *message, di_fault *fault) {
  fault->field[0] = 0;
  if (size > DI_MAX_FRAME_BYTES) {
    fault->text = "it is too large";
    return DI_V_TOO_LARGE;
  }
  if ((fault->text = di_check_structure(frame, size)) != NULL) return DI_V_DECODE;
  msgpack_unpacked_init(&message->unpacked);
  size_t offset = 0;
  di_verdict verdict = DI_V_DECODE;
  fault->text = "it cannot be read";
  if (msgpack_unpack_next(&message->unpacked, (const char *)frame, size, &offset) == MSGPACK_UNPACK_SUCCESS) {
    const msgpack_object *map = &message->unpacked.data, *name = find(map, "kind");
    const kind *kind = kinds[sender];
    if (name == NULL || name->type != MSGPACK_OBJECT_STR || name->via.str.size == 0) {
      fail(fault, "", "kind", "it has no kind");
    } else {
      while (kind->name != NULL && !is_word(name, kind->name)) kind++;
      message->kind = kind->name;
      if (kind->name == NULL) {
        fail(fault, "", "kind", "there is no such kind");
        verdict = DI_V_UNKNOWN_KIND;
      } else if (check_fields(kind->fields, map, kind->is_strict, "", fault) && check_whole(kind, map, fault)) {
        return DI_V_OK;
      }
    }
  }
  msgpack_unpacked_destroy(&message->unpacked);
  return verdict;
}

void di_message_free(di_message *message) { msgpack_unpacked_destroy(&message->unpacked); }

const char *di_verdict_name(di_verdict verdict) {
  static const char *const names[] = {"ok", "E_DECODE", "E_TOO_LARGE", "E_UNKNOWN_KIND"};
  return names[verdict];
}

/* ---- writing */

static void write_fields(const field *fields, const msgpack_object *map, const char *kind, msgpack_packer *packer);

static bool is_empty(const msgpack_object *value) {
  return (value->type == MSGPACK_OBJECT_STR && value->via.str.size == 0) ||
         (value->type == MSGPACK_OBJECT_BIN && value->via.bin.size == 0) ||
         (value->type == MSGPACK_OBJECT_ARRAY && value->via.array.size == 0);
}

static bool is_default(const field *field, const msgpack_object *value) {
  if (value == NULL) return field->fallback != WRITTEN;
  switch (field->fallback) {
    case NIL:
      return value->type == MSGPACK_OBJECT_NIL;
    case VALUE:
    case VALUE_OR_NIL:
      if (value->type == MSGPACK_OBJECT_BOOLEAN) return value->via.boolean == (field->value != 0);
      return is_number(value) && di_double(value) == field->value;
    case EMPTY:
      return is_empty(value);
    case EMPTY_OR_NIL: /* of `stop` an empty text is none */
      return value->type == MSGPACK_OBJECT_ARRAY && is_empty(value);
    case REQUIRED:
    case WRITTEN:
      return false;
  }
  return false;
}

static void write_biases(const msgpack_object *value, msgpack_packer *packer) {
  msgpack_pack_map(packer, value->via.map.size);
  for (uint32_t place = 0; place < value->via.map.size; place++) {
    msgpack_pack_object(packer, value->via.map.ptr[place].key);
    msgpack_pack_double(packer, di_double(&value->via.map.ptr[place].val));
  }
}

static void write_logprobs(const msgpack_object *value, msgpack_packer *packer) {
  msgpack_pack_array(packer, value->via.array.size);
  for (uint32_t place = 0; place < value->via.array.size; place++) {
    const msgpack_object *parts = value->via.array.ptr[place].via.array.ptr;
    msgpack_pack_array(packer, 4);
    msgpack_pack_object(packer, parts[0]);
    msgpack_pack_double(packer, di_double(&parts[1]));
    msgpack_pack_object(packer, parts[2]);
    msgpack_pack_array(packer, parts[3].via.array.size);
    for (uint32_t best = 0; best < parts[3].via.array.size; best++) {
      const msgpack_object *pair = parts[3].via.array.ptr[best].via.array.ptr;
      msgpack_pack_array(packer, 2);
      msgpack_pack_object(packer, pair[0]);
      msgpack_pack_double(packer, di_double(&pair[1]));
    }
  }
}

static void write_value(const field *field, const msgpack_object *value, msgpack_packer *packer) {
  if (field->type == STRUCT) {
    write_fields(field->inner, value, NULL, packer);
  } else if (value->type == MSGPACK_OBJECT_NIL) {
    msgpack_pack_nil(packer);
  } else if (field->type == NUMBER) {
    msgpack_pack_double(packer, di_double(value));
  } else if (field->type == BIASES) {
    write_biases(value, packer);
  } else if (field->type == LOGPROBS) {
    write_logprobs(value, packer);
  } else {
    msgpack_pack_object(packer, *value);
  }
}

/* `map` may be NULL: it is empty. */
static void write_fields(const field *fields, const msgpack_object *map, const char *kind, msgpack_packer *packer) {
  size_t size = kind != NULL;
  for (const field *field = fields; field->name != NULL; field++) {
    size += !is_default(field, map == NULL ? NULL : find(map, field->name));
  }
  msgpack_pack_map(packer, size);
  if (kind != NULL) {
    di_pack_text(packer, "kind");
    di_pack_text(packer, kind);
  }
  for (const field *field = fields; field->name != NULL; field++) {
    const msgpack_object *value = map == NULL ? NULL : find(map, field->name);
    if (is_default(field, value)) continue;
    di_pack_text(packer, field->name);
    write_value(field, value, packer);
  }
}

void di_write(di_sender sender, const di_message *message, msgpack_packer *packer) {
  const kind *kind = kinds[sender];
  while (strcmp(kind->name, message->kind) != 0) kind++;
  write_fields(kind->fields, &message->unpacked.data, kind->name, packer);
}

void di_pack_text(msgpack_packer *packer, const char *text) {
  msgpack_pack_str(packer, strlen(text));
  msgpack_pack_str_body(packer, text, strlen(text));
}

/* ---- reading what was checked */

const msgpack_object *di_find(const msgpack_object *map, const char *name) {
  const msgpack_object *value = find(map, name);
  return value == NULL || value->type == MSGPACK_OBJECT_NIL ? NULL : value;
}

int64_t di_int(const msgpack_object *map, const char *name, int64_t fallback) {
  const msgpack_object *value = di_find(map, name);
  if (value == NULL) return fallback;
  return value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER ? value->via.i64 : (int64_t)value->via.u64;
}

bool di_bool(const msgpack_object *map, const char *name) {
  const msgpack_object *value = di_find(map, name);
  return value != NULL && value->via.boolean;
}

void di_text(const msgpack_object *map, const char *name, char *target, size_t size) {
  const msgpack_object *value = di_find(map, name);
  size_t length = value == NULL ? 0 : value->via.str.size;
  if (length >= size) length = size - 1;
  if (length > 0) memcpy(target, value->via.str.ptr, length);
  target[length] = 0;
}

int32_t di_int32(const char *bytes) {
  const uint8_t *byte = (const uint8_t *)bytes;
  return (int32_t)((uint32_t)byte[0] | (uint32_t)byte[1] << 8 | (uint32_t)byte[2] << 16 | (uint32_t)byte[3] << 24);
}

double di_double(const msgpack_object *value) {
  if (value->type == MSGPACK_OBJECT_POSITIVE_INTEGER) return (double)value->via.u64;
  return value->type == MSGPACK_OBJECT_NEGATIVE_INTEGER ? (double)value->via.i64 : value->via.f64;
}
