/* A request as its SUBMIT. Every field that was set is written; whether it may be so is for the tables to say. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "request.h"
#include "wire.h"

di_request di_request_default(void) {
  return (di_request){
      .sampling = {.max_tokens = -1,
                   .temperature = 1,
                   .top_p = 1,
                   .repetition_penalty = 1,
                   .n = 1,
                   .logprobs = -1,
                   .seq_seed = -1},
      .thinking = -1,
      .queue_timeout_ms = -1,
      .timeout_ms = -1,
  };
}

/* A map whose size is known once its fields are there. */
typedef struct writer {
  msgpack_sbuffer body;
  msgpack_packer packer;
  size_t num_fields;
} writer;

static void begin(writer *w) {
  w->num_fields = 0;
  msgpack_sbuffer_init(&w->body);
  msgpack_packer_init(&w->packer, &w->body, msgpack_sbuffer_write);
}

static void finish(writer *w, msgpack_packer *packer, msgpack_sbuffer *target) {
  msgpack_pack_map(packer, w->num_fields);
  msgpack_sbuffer_write(target, w->body.data, w->body.size);
  msgpack_sbuffer_destroy(&w->body);
}

static void put_text(writer *w, const char *text) {
  di_pack_text(&w->packer, text);
}

static void name(writer *w, const char *name) {
  put_text(w, name);
  w->num_fields++;
}

static void text(writer *w, const char *field, const char *value) {
  if (value == NULL) return;
  name(w, field);
  put_text(w, value);
}

static void whole(writer *w, const char *field, int64_t value, int64_t fallback) {
  if (value == fallback) return;
  name(w, field);
  msgpack_pack_int64(&w->packer, value);
}

static void number(writer *w, const char *field, double value, double fallback) {
  if (value == fallback) return;
  name(w, field);
  msgpack_pack_double(&w->packer, value);
}

static void flag(writer *w, const char *field, bool value, bool fallback) {
  if (value == fallback) return;
  name(w, field);
  if (value) msgpack_pack_true(&w->packer);
  else msgpack_pack_false(&w->packer);
}

static void wholes(writer *w, const char *field, di_ids ids) {
  if (ids.data == NULL) return;
  name(w, field);
  msgpack_pack_array(&w->packer, ids.size);
  for (size_t place = 0; place < ids.size; place++) msgpack_pack_int32(&w->packer, ids.data[place]);
}

static void texts(writer *w, const char *field, const char *const *values, size_t size) {
  if (values == NULL) return;
  name(w, field);
  msgpack_pack_array(&w->packer, size);
  for (size_t place = 0; place < size; place++) put_text(w, values[place]);
}

static void packed(writer *w, const char *field, di_packed value) {
  if (value.data == NULL) return;
  name(w, field);
  msgpack_sbuffer_write(&w->body, value.data, value.size);
}

static void token_ids(writer *w, const char *field, di_ids ids) {
  if (ids.data == NULL) return;
  name(w, field);
  msgpack_pack_bin(&w->packer, 4 * ids.size);
  for (size_t place = 0; place < ids.size; place++) {
    uint32_t id = (uint32_t)ids.data[place];
    const char bytes[4] = {(char)id, (char)(id >> 8), (char)(id >> 16), (char)(id >> 24)};
    msgpack_pack_bin_body(&w->packer, bytes, sizeof bytes);
  }
}

static void biases(writer *w, const di_bias *biases, size_t size) {
  if (biases == NULL) return;
  name(w, "logit_bias");
  msgpack_pack_map(&w->packer, size);
  for (size_t place = 0; place < size; place++) {
    char id[16];
    snprintf(id, sizeof id, "%d", biases[place].token_id);
    put_text(w, id);
    msgpack_pack_double(&w->packer, biases[place].bias);
  }
}

static void chat(writer *w, const di_chat *messages, size_t size) {
  if (messages == NULL) return;
  name(w, "messages");
  msgpack_pack_array(&w->packer, size);
  for (size_t place = 0; place < size; place++) {
    msgpack_pack_map(&w->packer, 2);
    put_text(w, "role");
    put_text(w, messages[place].role);
    put_text(w, "content");
    put_text(w, messages[place].content);
  }
}

static void sampling(writer *outer, const di_sampling *s) {
  writer w;
  begin(&w);
  whole(&w, "max_tokens", s->max_tokens, -1);
  whole(&w, "min_tokens", s->min_tokens, 0);
  number(&w, "temperature", s->temperature, 1);
  number(&w, "top_p", s->top_p, 1);
  whole(&w, "top_k", s->top_k, 0);
  number(&w, "min_p", s->min_p, 0);
  number(&w, "repetition_penalty", s->repetition_penalty, 1);
  number(&w, "presence_penalty", s->presence_penalty, 0);
  number(&w, "frequency_penalty", s->frequency_penalty, 0);
  biases(&w, s->logit_bias, s->num_logit_bias);
  wholes(&w, "allowed_token_ids", s->allowed_token_ids);
  wholes(&w, "banned_token_ids", s->banned_token_ids);
  texts(&w, "bad_words", s->bad_words, s->num_bad_words);
  text(&w, "json_schema", s->json_schema);
  text(&w, "regex", s->regex);
  texts(&w, "choice", s->choice, s->num_choice);
  text(&w, "grammar", s->grammar);
  whole(&w, "n", s->n, 1);
  texts(&w, "stop", s->stop, s->num_stop);
  wholes(&w, "stop_token_ids", s->stop_token_ids);
  flag(&w, "include_stop_str_in_output", s->include_stop_str_in_output, false);
  flag(&w, "ignore_eos", s->ignore_eos, false);
  whole(&w, "logprobs", s->logprobs, -1);
  whole(&w, "seq_seed", s->seq_seed, -1);
  flag(&w, "skip_special_tokens", !s->keep_special_tokens, true);
  flag(&w, "skip_reading_prefix_cache", s->skip_reading_prefix_cache, false);
  flag(&w, "detokenize", !s->no_text, true);
  name(outer, "sampling");
  finish(&w, &outer->packer, &outer->body);
}

void di_pack_submit(const di_request *request, const char *id, int32_t credit, msgpack_sbuffer *frame) {
  writer w;
  begin(&w);
  text(&w, "kind", "submit");
  text(&w, "id", id);
  text(&w, "prompt", request->prompt);
  token_ids(&w, "token_ids", request->token_ids);
  chat(&w, request->chat, request->num_chat);
  packed(&w, "messages", request->messages); /* with chat as well it is there twice, which is refused */
  sampling(&w, &request->sampling);
  if (request->thinking >= 0) {
    name(&w, "thinking");
    if (request->thinking) msgpack_pack_true(&w.packer);
    else msgpack_pack_false(&w.packer);
  }
  text(&w, "reasoning_effort", request->reasoning_effort);
  packed(&w, "tools", request->tools);
  packed(&w, "tool_choice", request->tool_choice);
  whole(&w, "priority", request->priority, 0);
  whole(&w, "queue_timeout_ms", request->queue_timeout_ms, -1);
  whole(&w, "timeout_ms", request->timeout_ms, -1);
  flag(&w, "resumable", !request->not_resumable, false);
  whole(&w, "credit", credit, 1024);
  text(&w, "traceparent", request->traceparent);
  msgpack_packer packer;
  msgpack_packer_init(&packer, frame, msgpack_sbuffer_write);
  finish(&w, &packer, frame);
}
