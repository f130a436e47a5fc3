/*
 * vectors [FILE]: every golden frame. Verdicts of both directions; of what is accepted the value, printed as the file
 * prints it, and the bytes that writing it gives.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/wire.h"

static char *json; /* what was printed */
static FILE *out;

static void print_text(const msgpack_object_str *text) {
  fputc('"', out);
  for (uint32_t place = 0; place < text->size; place++) {
    unsigned char letter = (unsigned char)text->ptr[place];
    static const char named[] = "\"\\\n\r\t\b\f", names[] = "\"\\nrtbf";
    const char *found = letter == 0 ? NULL : strchr(named, letter);
    if (found != NULL) fprintf(out, "\\%c", names[found - named]);
    else if (letter < 0x20) fprintf(out, "\\u%04x", letter);
    else fputc(letter, out);
  }
  fputc('"', out);
}

/* The fewest digits that give the number again, as Python writes it. */
static void print_double(double number) {
  char text[40];
  for (int precision = 1; precision <= 17; precision++) {
    snprintf(text, sizeof text, "%.*g", precision, number);
    if (strtod(text, NULL) == number) break;
  }
  if (strchr(text, 'e') != NULL && number < 1e16 && number > -1e16 && (number >= 1e-4 || number <= -1e-4)) {
    snprintf(text, sizeof text, "%.0f", number);
  }
  fprintf(out, "%s%s", text, strpbrk(text, ".e") == NULL ? ".0" : "");
}

static void print_ids(const msgpack_object_bin *ids) {
  fputc('[', out);
  for (uint32_t place = 0; place < ids->size; place += 4) {
    fprintf(out, "%s%d", place > 0 ? ", " : "", di_int32(ids->ptr + place));
  }
  fputc(']', out);
}

static void print(const msgpack_object *value) {
  switch (value->type) {
    case MSGPACK_OBJECT_NIL:
      fputs("null", out);
      break;
    case MSGPACK_OBJECT_BOOLEAN:
      fputs(value->via.boolean ? "true" : "false", out);
      break;
    case MSGPACK_OBJECT_POSITIVE_INTEGER:
      fprintf(out, "%llu", (unsigned long long)value->via.u64);
      break;
    case MSGPACK_OBJECT_NEGATIVE_INTEGER:
      fprintf(out, "%lld", (long long)value->via.i64);
      break;
    case MSGPACK_OBJECT_FLOAT32:
    case MSGPACK_OBJECT_FLOAT64:
      print_double(value->via.f64);
      break;
    case MSGPACK_OBJECT_STR:
      print_text(&value->via.str);
      break;
    case MSGPACK_OBJECT_BIN:
      print_ids(&value->via.bin);
      break;
    case MSGPACK_OBJECT_ARRAY:
      fputc('[', out);
      for (uint32_t place = 0; place < value->via.array.size; place++) {
        if (place > 0) fputs(", ", out);
        print(&value->via.array.ptr[place]);
      }
      fputc(']', out);
      break;
    case MSGPACK_OBJECT_MAP:
      fputc('{', out);
      for (uint32_t place = 0; place < value->via.map.size; place++) {
        if (place > 0) fputs(", ", out);
        print(&value->via.map.ptr[place].key);
        fputs(": ", out);
        print(&value->via.map.ptr[place].val);
      }
      fputc('}', out);
      break;
    default:
      fputs("?", out);
  }
}

/* The text under a key of a line; what follows `"key": "`, up to the next quote. */
static char *text_of(const char *line, const char *key) {
  char mark[32];
  snprintf(mark, sizeof mark, "\"%s\": \"", key);
  const char *start = strstr(line, mark);
  if (start == NULL) exit(3);
  start += strlen(mark);
  return strndup(start, strcspn(start, "\""));
}

static size_t from_hex(const char *hex, uint8_t *bytes) {
  size_t size = strlen(hex) / 2;
  for (size_t place = 0; place < size; place++) {
    unsigned byte;
    sscanf(hex + 2 * place, "%2x", &byte);
    bytes[place] = (uint8_t)byte;
  }
  return size;
}

/* Two values have a field with its default: it was written in their frames. */
static void drop_default(char *value, const char *field) {
  char *found = strstr(value, field);
  if (found != NULL) memmove(found, found + strlen(field), strlen(found + strlen(field)) + 1);
}

/* NULL, or what is not as the line says. */
static const char *check(char *line) {
  char *from = text_of(line, "from"), *verdict = text_of(line, "verdict"), *hex = text_of(line, "hex");
  di_sender sender = strcmp(from, "server") == 0 ? DI_FROM_SERVER : DI_FROM_CLIENT;
  uint8_t *frame = malloc(strlen(hex) / 2 + 1);
  size_t size = from_hex(hex, frame);
  const char *wrong = NULL;
  di_message message;
  di_fault fault;
  di_verdict got = di_decode(sender, frame, size, &message, &fault);
  if (strcmp(di_verdict_name(got), verdict) != 0) {
    wrong = di_verdict_name(got);
  } else if (got == DI_V_OK) {
    msgpack_sbuffer again;
    msgpack_packer packer;
    msgpack_sbuffer_init(&again);
    msgpack_packer_init(&packer, &again, msgpack_sbuffer_write);
    di_write(sender, &message, &packer);
    msgpack_unpacked unpacked;
    msgpack_unpacked_init(&unpacked);
    size_t offset = 0, json_size = 0;
    msgpack_unpack_next(&unpacked, again.data, again.size, &offset);
    out = open_memstream(&json, &json_size);
    print(&unpacked.data);
    fputs("}\n", out);
    fclose(out);
    char *value = strstr(line, "\"value\": ") + 9;
    drop_default(value, ", \"credit\": 1024");
    drop_default(value, "\"temperature\": 1.0");
    if (strcmp(value, json) != 0) wrong = json;
    if (strstr(line, "\"canonical\": true") != NULL && (size != again.size || memcmp(frame, again.data, size) != 0)) {
      wrong = "other bytes";
    }
    msgpack_unpacked_destroy(&unpacked);
    msgpack_sbuffer_destroy(&again);
    di_message_free(&message);
  }
  free(frame), free(from), free(verdict), free(hex);
  return wrong;
}

int main(int argc, char **argv) {
  FILE *file = fopen(argc > 1 ? argv[1] : GOLDEN, "r");
  if (file == NULL) return perror("the golden file"), 2;
  char *line = NULL;
  size_t size = 0;
  int num_passed = 0, num_failed = 0;
  if (getline(&line, &size, file) < 0 || strcmp(line, "{\"wire\": \"client\", \"version\": 1}\n") != 0) return 2;
  while (getline(&line, &size, file) > 0) {
    const char *wrong = check(line);
    if (wrong == NULL) {
      num_passed++;
    } else {
      char *name = text_of(line, "name");
      printf("%s: %s\n", name, wrong);
      free(name);
      num_failed++;
    }
    free(json);
    json = NULL;
  }
  free(line);
  fclose(file);
  printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed > 0;
}
