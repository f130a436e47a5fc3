/* The client: a socket, a clock, and what is due when. docs/wire.md, "A client in short". */
#include "deepinfer_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <zmq.h>

#include "request.h"
#include "wire.h"

#define WIRE_VERSION 1
#define CLIENT_NAME "deepinfer-c 0.1.0"
#define E_HELLO 7
#define E_NOT_FOUND 14
#define SILENT_PINGS 3
#define HELLO_MS 1000 /* how often HELLO is said while no server has told its ping_ms */
#define RETRY_MS 50   /* how soon it is said again while ZeroMQ still connects */
#define TICK_MS 100
#define FAREWELL_MS 500
#define MAX_READS_AT_ONCE 256

/* A DELTA, and what of it is handed out. */
typedef struct piece {
  struct piece *next;
  di_chunk chunk;
  int32_t *token_ids;
  di_logprob *logprobs;
  di_top *tops;
  char *text;
  char *stop_text;
  char reason[16];
} piece;

struct di_stream {
  di_stream *next;
  di_client *client;
  char id[65];
  msgpack_sbuffer submit; /* to be said again byte for byte */
  int32_t window;
  bool is_resumable;
  bool is_cancelled;
  bool is_resuming; /* a RESUME is under way: what follows the gap comes again */
  bool is_ended;    /* FINISH or ERROR came, or nothing can */
  bool is_freed;    /* by its user; the server has not yet said its end */
  int64_t limit;    /* tokens that the server may have sent */
  int64_t num_read;
  int64_t num_deltas;
  piece *first, *last; /* received, not read */
  piece *handed;       /* the one that the user holds */
  di_status status;    /* at the end */
  di_error error;
  di_summary summary;
  char reason[16];
};

struct di_client {
  void *context;
  void *socket;
  char session[33];
  char token[1025];
  int32_t give_up_ms;
  int32_t window;
  di_server server;
  bool was_welcome;
  bool is_welcome;
  bool is_rejected;
  bool is_unsent; /* a frame could not leave: the connection is lost */
  di_error rejection; /* the last REJECT since the last WELCOME; final where `is_rejected` */
  int64_t said_at, asked_at, lost_at, hello_at, deadline_at; /* ms; asked_at: of a PING that nothing answered; 0: never */
  int32_t num_reconnects;
  di_stream *streams;
};

static int64_t now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void random_hex(char *target, size_t num_bytes) {
  unsigned char bytes[16];
  if (getrandom(bytes, num_bytes, 0) != (ssize_t)num_bytes) abort(); /* never for so few */
  for (size_t place = 0; place < num_bytes; place++) sprintf(target + 2 * place, "%02x", bytes[place]);
}

static di_status say_error(di_error *error, di_status status, const char *field, const char *text) {
  if (error != NULL) {
    memset(error, 0, sizeof *error);
    snprintf(error->field, sizeof error->field, "%s", field);
    snprintf(error->text, sizeof error->text, "%s", text);
  }
  return status;
}

/* ---- sending */

static void send_frame(di_client *client, const char *data, size_t size) {
  if (client->is_unsent) return; /* what follows is lost with it, and renewed by the next WELCOME */
  if (zmq_send(client->socket, data, size, ZMQ_DONTWAIT) < 0) client->is_unsent = true;
}

static void pack_int(msgpack_packer *packer, const char *name, int64_t value) {
  di_pack_text(packer, name);
  msgpack_pack_int64(packer, value);
}

/* `kind`, `id`, and up to two whole numbers. */
static void say(di_client *client, const char *kind, const char *id, const char *name, int64_t value,
                const char *second, int64_t second_value) {
  msgpack_sbuffer frame;
  msgpack_packer packer;
  msgpack_sbuffer_init(&frame);
  msgpack_packer_init(&packer, &frame, msgpack_sbuffer_write);
  msgpack_pack_map(&packer, 1u + (id != NULL) + (name != NULL) + (second != NULL));
  di_pack_text(&packer, "kind");
  di_pack_text(&packer, kind);
  if (id != NULL) {
    di_pack_text(&packer, "id");
    di_pack_text(&packer, id);
  }
  if (name != NULL) pack_int(&packer, name, value);
  if (second != NULL) pack_int(&packer, second, second_value);
  send_frame(client, frame.data, frame.size);
  msgpack_sbuffer_destroy(&frame);
}

/* As much of a window as a stream can use: a server waits for acks, which come when half of it was read. */
static int32_t usable(const di_client *client, int32_t window) {
  int32_t most = client->server.max_unacked_tokens < 2 ? 2 : client->server.max_unacked_tokens;
  return window < most ? window : most;
}

static int32_t ping_ms(const di_client *client) { return client->was_welcome ? client->server.ping_ms : HELLO_MS; }

static void hello(di_client *client, int64_t now) {
  msgpack_sbuffer frame;
  msgpack_packer packer;
  msgpack_sbuffer_init(&frame);
  msgpack_packer_init(&packer, &frame, msgpack_sbuffer_write);
  msgpack_pack_map(&packer, 6);
  di_pack_text(&packer, "kind");
  di_pack_text(&packer, "hello");
  pack_int(&packer, "min_version", WIRE_VERSION);
  pack_int(&packer, "max_version", WIRE_VERSION);
  di_pack_text(&packer, "session");
  di_pack_text(&packer, client->session);
  di_pack_text(&packer, "client");
  di_pack_text(&packer, CLIENT_NAME);
  di_pack_text(&packer, "token");
  di_pack_text(&packer, client->token);
  send_frame(client, frame.data, frame.size);
  msgpack_sbuffer_destroy(&frame);
  client->said_at = now;
  client->hello_at = now + ping_ms(client);
  if (client->lost_at == 0) client->lost_at = now;
}

/* ---- ends of streams */

static void free_piece(piece *piece) {
  if (piece == NULL) return;
  free(piece->token_ids), free(piece->logprobs), free(piece->tops), free(piece->text), free(piece->stop_text);
  free(piece);
}

static void drop_pieces(di_stream *stream) {
  while (stream->first != NULL) {
    piece *next = stream->first->next;
    free_piece(stream->first);
    stream->first = next;
  }
  stream->last = NULL;
}

static void destroy(di_stream *stream) {
  di_stream **place = &stream->client->streams;
  while (*place != NULL && *place != stream) place = &(*place)->next;
  if (*place == stream) *place = stream->next;
  drop_pieces(stream);
  free_piece(stream->handed);
  msgpack_sbuffer_destroy(&stream->submit);
  free(stream);
}

/* `stream` may be gone after this. */
static void end(di_stream *stream, di_status status) {
  if (stream->is_ended) return;
  stream->is_ended = true;
  stream->status = stream->is_cancelled ? DI_END : status;
  if (stream->is_freed) destroy(stream);
}

static void end_lost(di_stream *stream, const char *text) {
  if (!stream->is_ended) say_error(&stream->error, DI_LOST, "", text);
  end(stream, DI_LOST);
}

static void end_all_lost(di_client *client, const char *text) {
  for (di_stream *stream = client->streams, *next; stream != NULL; stream = next) {
    next = stream->next;
    end_lost(stream, text);
  }
}

static void lose(di_client *client, int64_t now) {
  if (client->is_welcome) {
    client->is_welcome = false;
    client->lost_at = now;
  }
  client->hello_at = now;
  client->asked_at = 0;
}

/* ---- what the server says */

static di_stream *find_stream(di_client *client, const msgpack_object *map) {
  char id[65];
  di_text(map, "id", id, sizeof id);
  di_stream *stream = client->streams;
  while (stream != NULL && (stream->is_ended || strcmp(stream->id, id) != 0)) stream = stream->next;
  return stream;
}

static void read_error(const msgpack_object *map, di_error *error) {
  char text[2049], detail[2049];
  memset(error, 0, sizeof *error);
  error->code = (int32_t)di_int(map, "code", 0);
  di_text(map, "name", error->name, sizeof error->name);
  di_text(map, "field", error->field, sizeof error->field);
  di_text(map, "text", text, sizeof text);
  di_text(map, "detail", detail, sizeof detail);
  snprintf(error->text, sizeof error->text, "%.500s%s%.500s", text, *detail != 0 ? ": " : "", detail);
  error->retryable = di_bool(map, "retryable");
  error->retry_after_ms = (int32_t)di_int(map, "retry_after_ms", 0);
}

static void resume(di_stream *stream) {
  if (!stream->is_resumable) {
    say(stream->client, "cancel", stream->id, NULL, 0, NULL, 0);
    end_lost(stream, "a part of the stream was lost");
  } else if (!stream->is_resuming) {
    stream->is_resuming = true;
    if (stream->num_read + stream->window > stream->limit) stream->limit = stream->num_read + stream->window;
    say(stream->client, "resume", stream->id, "next", stream->num_deltas, "limit", stream->limit);
  }
}

static char *copy_text(const msgpack_object *value, size_t *size) {
  *size = value == NULL ? 0 : value->via.str.size;
  char *text = malloc(*size + 1);
  if (text == NULL) abort();
  if (*size > 0) memcpy(text, value->via.str.ptr, *size);
  text[*size] = 0;
  return text;
}

static void *room(size_t number, size_t size) {
  void *memory = calloc(number + 1, size);
  if (memory == NULL) abort();
  return memory;
}

static void read_logprobs(const msgpack_object *value, piece *piece) {
  size_t number = value->via.array.size, num_tops = 0;
  for (size_t place = 0; place < number; place++) {
    num_tops += value->via.array.ptr[place].via.array.ptr[3].via.array.size;
  }
  piece->logprobs = room(number, sizeof *piece->logprobs);
  piece->tops = room(num_tops, sizeof *piece->tops);
  di_top *top = piece->tops;
  for (size_t place = 0; place < number; place++) {
    const msgpack_object *parts = value->via.array.ptr[place].via.array.ptr;
    const msgpack_object_array *best = &parts[3].via.array;
    piece->logprobs[place] = (di_logprob){(int32_t)parts[0].via.u64, di_double(&parts[1]),
                                          (int32_t)parts[2].via.u64, top, best->size};
    for (uint32_t at = 0; at < best->size; at++, top++) {
      const msgpack_object *pair = best->ptr[at].via.array.ptr;
      *top = (di_top){(int32_t)pair[0].via.u64, di_double(&pair[1])};
    }
  }
  piece->chunk.logprobs = piece->logprobs;
}

static piece *read_piece(const msgpack_object *map) {
  piece *piece = room(0, sizeof *piece);
  di_chunk *chunk = &piece->chunk;
  chunk->sample = (int32_t)di_int(map, "sample", 0);
  chunk->index = (int32_t)di_int(map, "index", 0);
  const msgpack_object *ids = di_find(map, "token_ids"), *logprobs = di_find(map, "logprobs");
  const msgpack_object *stop = di_find(map, "stop");
  chunk->num_tokens = ids == NULL ? 0 : ids->via.bin.size / 4;
  piece->token_ids = room(chunk->num_tokens, sizeof *piece->token_ids);
  for (size_t place = 0; place < chunk->num_tokens; place++) {
    piece->token_ids[place] = di_int32(ids->via.bin.ptr + 4 * place);
  }
  chunk->token_ids = piece->token_ids;
  chunk->text = piece->text = copy_text(di_find(map, "text"), &chunk->text_size);
  if (logprobs != NULL) read_logprobs(logprobs, piece);
  di_text(map, "reason", piece->reason, sizeof piece->reason);
  chunk->reason = *piece->reason != 0 ? piece->reason : NULL;
  chunk->stop_token = -1;
  if (stop != NULL && stop->type == MSGPACK_OBJECT_STR) {
    size_t size;
    chunk->stop_text = piece->stop_text = copy_text(stop, &size);
  } else if (stop != NULL) {
    chunk->stop_token = (int32_t)stop->via.u64;
  }
  return piece;
}

static void on_delta(di_client *client, const msgpack_object *map) {
  di_stream *stream = find_stream(client, map);
  int64_t seq = di_int(map, "seq", 0);
  if (stream == NULL || stream->is_cancelled || seq < stream->num_deltas) return;
  if (seq > stream->num_deltas) {
    resume(stream);
    return;
  }
  stream->is_resuming = false;
  stream->num_deltas++;
  piece *piece = read_piece(map);
  if (stream->last == NULL) stream->first = piece;
  else stream->last->next = piece;
  stream->last = piece;
}

static void on_finish(di_client *client, const msgpack_object *map) {
  di_stream *stream = find_stream(client, map);
  if (stream == NULL) return;
  if (di_int(map, "seq", 0) > stream->num_deltas && !stream->is_cancelled) {
    resume(stream);
    return;
  }
  di_text(map, "reason", stream->reason, sizeof stream->reason);
  di_summary *summary = &stream->summary;
  const msgpack_object *usage = di_find(map, "usage"), *timings = di_find(map, "timings");
  if (usage != NULL) {
    summary->prompt_tokens = (int32_t)di_int(usage, "prompt_tokens", 0);
    summary->cached_tokens = (int32_t)di_int(usage, "cached_tokens", 0);
    summary->generated_tokens = (int32_t)di_int(usage, "generated_tokens", 0);
    summary->preemptions = (int32_t)di_int(usage, "preemptions", 0);
  }
  if (timings != NULL) {
    summary->first_token_us = di_int(timings, "first_token_us", 0);
    summary->total_us = di_int(timings, "total_us", 0);
  }
  end(stream, DI_END);
}

static void on_error(di_client *client, const msgpack_object *map, int64_t now) {
  int64_t code = di_int(map, "code", 0);
  if (code == E_HELLO) {
    if (client->is_welcome) lose(client, now); /* else a HELLO is under way */
    return;
  }
  di_stream *stream = find_stream(client, map);
  if (stream == NULL) return;
  if (di_int(map, "seq", 0) > stream->num_deltas && code != E_NOT_FOUND && !stream->is_cancelled) {
    resume(stream);
    return;
  }
  read_error(map, &stream->error);
  end(stream, code == E_NOT_FOUND ? DI_LOST : DI_REFUSED);
}

static void read_server(const msgpack_object *map, di_server *server) {
  const msgpack_object *limits = di_find(map, "limits");
  di_text(map, "engine", server->engine, sizeof server->engine);
  di_text(map, "server", server->server, sizeof server->server);
  di_text(map, "model", server->model, sizeof server->model);
  server->vocab_size = (int32_t)di_int(map, "vocab_size", 0);
  server->max_length = (int32_t)di_int(map, "max_length", 0);
  server->has_tokenizer = di_bool(map, "has_tokenizer");
  server->has_chat = di_bool(map, "has_chat");
  server->max_streams = (int32_t)di_int(limits, "max_streams", 0);
  server->retention_ms = (int32_t)di_int(limits, "retention_ms", 0);
  server->max_unacked_tokens = (int32_t)di_int(limits, "max_unacked_tokens", 0);
  server->ping_ms = (int32_t)di_int(limits, "ping_ms", 0);
  server->idle_ms = (int32_t)di_int(limits, "idle_ms", 0);
}

/* The server may have got it before: the same bytes. It may be another one, with less room. */
static void resubmit(di_stream *stream) {
  stream->window = usable(stream->client, stream->window);
  stream->limit = stream->window;
  send_frame(stream->client, stream->submit.data, stream->submit.size);
}

/* A new connection: say again what is open. None is before the first one. */
static void renew(di_stream *stream, bool is_same) {
  stream->is_resuming = false;
  if (stream->is_ended) return;
  if (stream->is_cancelled) say(stream->client, "cancel", stream->id, NULL, 0, NULL, 0);
  else if (stream->num_deltas == 0) resubmit(stream);
  else if (is_same && stream->is_resumable) resume(stream);
  else end_lost(stream, "the stream was lost with the connection");
}

static void on_welcome(di_client *client, const msgpack_object *map, int64_t now) {
  char engine[sizeof client->server.engine];
  di_text(map, "engine", engine, sizeof engine);
  bool is_same = client->was_welcome && strcmp(engine, client->server.engine) == 0;
  client->num_reconnects += client->was_welcome;
  read_server(map, &client->server);
  client->was_welcome = client->is_welcome = true;
  client->lost_at = client->deadline_at = 0;
  client->said_at = now;
  if (!client->is_rejected) memset(&client->rejection, 0, sizeof client->rejection);
  for (di_stream *stream = client->streams, *next; stream != NULL; stream = next) {
    next = stream->next;
    renew(stream, is_same);
  }
}

static void on_reject(di_client *client, const msgpack_object *map, int64_t now) {
  read_error(map, &client->rejection);
  if (client->rejection.retryable) {
    int64_t not_before = now + client->rejection.retry_after_ms;
    if (not_before > client->hello_at) client->hello_at = not_before; /* it was just said */
    return;
  }
  client->is_rejected = true;
  client->is_welcome = false;
  for (di_stream *stream = client->streams, *next; stream != NULL; stream = next) {
    next = stream->next;
    if (!stream->is_ended) stream->error = client->rejection;
    end(stream, DI_REFUSED);
  }
}

/* What is no message is skipped: a gap that it leaves shows by the next one. */
static void receive(di_client *client, const uint8_t *frame, size_t size, int64_t now) {
  di_message message;
  di_fault fault;
  if (di_decode(DI_FROM_SERVER, frame, size, &message, &fault) != DI_V_OK) return;
  client->asked_at = 0;
  const msgpack_object *map = &message.unpacked.data;
  if (strcmp(message.kind, "delta") == 0) on_delta(client, map);
  else if (strcmp(message.kind, "finish") == 0) on_finish(client, map);
  else if (strcmp(message.kind, "error") == 0) on_error(client, map, now);
  else if (strcmp(message.kind, "welcome") == 0) on_welcome(client, map, now);
  else if (strcmp(message.kind, "reject") == 0) on_reject(client, map, now);
  else if (strcmp(message.kind, "goaway") == 0) client->deadline_at = now + di_int(map, "deadline_ms", 0);
  di_message_free(&message); /* PONG has been heard */
}

/* False: nothing is there. */
static bool receive_one(di_client *client) {
  zmq_msg_t part;
  int num_parts = 0, has_more = 1;
  bool is_read = false;
  while (has_more) {
    zmq_msg_init(&part);
    if (zmq_msg_recv(&part, client->socket, ZMQ_DONTWAIT) < 0) {
      zmq_msg_close(&part);
      return is_read;
    }
    is_read = true;
    has_more = zmq_msg_more(&part);
    if (++num_parts == 1 && !has_more) receive(client, zmq_msg_data(&part), zmq_msg_size(&part), now_ms());
    zmq_msg_close(&part);
  }
  return true;
}

/* ---- time */

static void tick(di_client *client) {
  int64_t now = now_ms();
  if (client->is_unsent) {
    client->is_unsent = false;
    lose(client, now);
    client->hello_at = now + RETRY_MS;
  }
  if (client->is_rejected) return;
  if (!client->is_welcome) {
    if (now >= client->hello_at) hello(client, now);
    if (client->lost_at != 0 && now - client->lost_at > client->give_up_ms) {
      end_all_lost(client, "the server was out of reach for too long");
    }
  } else if (client->asked_at != 0 && now - client->asked_at > SILENT_PINGS * (int64_t)ping_ms(client)) {
    lose(client, now);
  } else if (now - client->said_at >= ping_ms(client)) {
    client->said_at = now;
    if (client->asked_at == 0) client->asked_at = now;
    say(client, "ping", NULL, NULL, 0, NULL, 0);
  }
}

/* One round: waits for `wait_ms` at most. */
static void serve(di_client *client, int64_t wait_ms) {
  zmq_pollitem_t item = {client->socket, 0, ZMQ_POLLIN, 0};
  int64_t most = client->is_welcome ? TICK_MS : RETRY_MS;
  zmq_poll(&item, 1, (long)(wait_ms < most ? wait_ms : most));
  for (int number = 0; number < MAX_READS_AT_ONCE && receive_one(client); number++) {
  }
  tick(client);
}

/* ---- the connection */

di_options di_options_default(void) {
  return (di_options){.token = "", .timeout_ms = 10000, .give_up_ms = 30000, .window = 1024};
}

static bool set_int(void *socket, int option, int value) {
  return zmq_setsockopt(socket, option, &value, sizeof value) == 0;
}

static bool set_options(void *socket, const di_options *options) {
  int64_t most = DI_MAX_FRAME_BYTES;
  bool is_good = set_int(socket, ZMQ_LINGER, 0) && set_int(socket, ZMQ_IMMEDIATE, 1) &&
                 set_int(socket, ZMQ_IPV6, 1) && set_int(socket, ZMQ_RECONNECT_IVL, 50) &&
                 set_int(socket, ZMQ_RECONNECT_IVL_MAX, 1000) && set_int(socket, ZMQ_HEARTBEAT_IVL, 1000) &&
                 set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, 5000) &&
                 zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most, sizeof most) == 0;
  if (!is_good || options->server_key == NULL) return is_good;
  return zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, options->server_key, strlen(options->server_key) + 1) == 0 &&
         zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, options->public_key, strlen(options->public_key) + 1) == 0 &&
         zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, options->secret_key, strlen(options->secret_key) + 1) == 0;
}

/* Of keys that only make sense together; NULL: all are there, or none. Without the server's a connection is plain text. */
static const char *missing_key(const di_options *options) {
  bool is_any = options->server_key != NULL || options->public_key != NULL || options->secret_key != NULL;
  if (!is_any) return NULL;
  if (options->server_key == NULL) return "server_key";
  if (options->public_key == NULL) return "public_key";
  return options->secret_key == NULL ? "secret_key" : NULL;
}

static di_status wait_welcome(di_client *client, int64_t timeout_ms, di_error *error) {
  int64_t deadline = now_ms() + timeout_ms;
  while (!client->is_welcome) {
    int64_t left = deadline - now_ms();
    if (client->is_rejected || (left <= 0 && client->rejection.retryable)) {
      if (error != NULL) *error = client->rejection;
      return DI_REFUSED;
    }
    if (left <= 0) return say_error(error, DI_LOST, "", "no answer in time");
    serve(client, left);
  }
  return DI_OK;
}

di_status di_connect(const char *url, const di_options *options, di_client **result, di_error *error) {
  di_options defaults = di_options_default();
  if (options == NULL) options = &defaults;
  *result = NULL;
  if (options->window < 2 || options->window > 1 << 20) return say_error(error, DI_INVALID, "window", "2 to 2^20");
  const char *missing = missing_key(options);
  if (missing != NULL) return say_error(error, DI_INVALID, missing, "all three keys are needed, or none");
  di_client *client = calloc(1, sizeof *client);
  if (client == NULL) return say_error(error, DI_SYSTEM, "", strerror(ENOMEM));
  random_hex(client->session, 16);
  snprintf(client->token, sizeof client->token, "%s", options->token == NULL ? "" : options->token);
  client->give_up_ms = options->give_up_ms;
  client->window = options->window;
  client->context = zmq_ctx_new();
  client->socket = client->context == NULL ? NULL : zmq_socket(client->context, ZMQ_DEALER);
  di_status status = DI_OK;
  if (client->socket == NULL || !set_options(client->socket, options) || zmq_connect(client->socket, url) != 0) {
    status = say_error(error, DI_SYSTEM, "", zmq_strerror(zmq_errno()));
  } else {
    status = wait_welcome(client, options->timeout_ms, error);
  }
  if (status == DI_OK) *result = client;
  else di_close(client);
  return status;
}

void di_close(di_client *client) {
  if (client == NULL) return;
  while (client->streams != NULL) destroy(client->streams);
  if (client->socket != NULL) {
    if (client->is_welcome) {
      set_int(client->socket, ZMQ_LINGER, FAREWELL_MS);
      say(client, "bye", NULL, NULL, 0, NULL, 0);
    }
    zmq_close(client->socket);
  }
  if (client->context != NULL) zmq_ctx_term(client->context);
  free(client);
}

void di_poll(di_client *client, int timeout_ms) {
  int64_t deadline = now_ms() + timeout_ms;
  do {
    int64_t left = deadline - now_ms();
    serve(client, left > 0 ? left : 0);
  } while (now_ms() < deadline);
}

const di_server *di_client_server(const di_client *client) { return &client->server; }

bool di_client_is_connected(const di_client *client) { return client->is_welcome; }

int32_t di_client_deadline_ms(const di_client *client) {
  if (client->deadline_at == 0) return -1;
  int64_t left = client->deadline_at - now_ms();
  return left > 0 ? (int32_t)left : 0;
}

int32_t di_client_reconnects(const di_client *client) { return client->num_reconnects; }

/* ---- streams */

static bool is_open(const di_client *client, const char *id) {
  const di_stream *stream = client->streams;
  while (stream != NULL && (stream->is_ended || strcmp(stream->id, id) != 0)) stream = stream->next;
  return stream != NULL;
}

di_status di_submit(di_client *client, const di_request *request, di_stream **result, di_error *error) {
  *result = NULL;
  if (client->is_rejected) {
    if (error != NULL) *error = client->rejection;
    return DI_REFUSED;
  }
  di_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) return say_error(error, DI_SYSTEM, "", strerror(ENOMEM));
  if (request->id == NULL) random_hex(stream->id, 8);
  else snprintf(stream->id, sizeof stream->id, "%s", request->id);
  stream->client = client;
  stream->window = usable(client, client->window);
  stream->limit = stream->window;
  stream->is_resumable = !request->not_resumable;
  msgpack_sbuffer_init(&stream->submit);
  di_pack_submit(request, request->id == NULL ? stream->id : request->id, stream->window, &stream->submit);
  di_message message;
  di_fault fault;
  const uint8_t *frame = (const uint8_t *)stream->submit.data;
  if (di_decode(DI_FROM_CLIENT, frame, stream->submit.size, &message, &fault) != DI_V_OK) {
    destroy(stream);
    return say_error(error, DI_INVALID, fault.field, fault.text);
  }
  di_message_free(&message);
  if (is_open(client, stream->id)) {
    destroy(stream);
    return say_error(error, DI_INVALID, "id", "a request with this id is open");
  }
  stream->next = client->streams;
  client->streams = stream;
  if (client->is_welcome) send_frame(client, stream->submit.data, stream->submit.size);
  *result = stream;
  return DI_OK;
}

static void take(di_stream *stream, di_chunk *chunk) {
  piece *piece = stream->first;
  stream->first = piece->next;
  if (stream->first == NULL) stream->last = NULL;
  free_piece(stream->handed);
  stream->handed = piece;
  stream->num_read += (int64_t)piece->chunk.num_tokens;
  *chunk = piece->chunk;
  int64_t limit = stream->num_read + stream->window;
  if (!stream->is_ended && stream->client->is_welcome && 2 * (limit - stream->limit) >= stream->window) {
    stream->limit = limit;
    say(stream->client, "credit", stream->id, "limit", limit, "ack", stream->num_deltas);
  }
}

di_status di_next(di_stream *stream, int timeout_ms, di_chunk *chunk) {
  int64_t deadline = timeout_ms < 0 ? INT64_MAX : now_ms() + timeout_ms;
  for (bool is_served = false;; is_served = true) {
    if (stream->first != NULL) {
      if (!is_served) serve(stream->client, 0); /* a reader that is never short of chunks still has to ping */
      if (stream->first != NULL) return take(stream, chunk), DI_OK;
    }
    if (stream->is_ended) return stream->status;
    if (stream->is_cancelled && !stream->client->is_welcome) return DI_END; /* the server hears of it later */
    int64_t left = deadline - now_ms();
    if (left <= 0 && is_served) return DI_TIMEOUT;
    serve(stream->client, left > 0 ? left : 0);
  }
}

void di_cancel(di_stream *stream) {
  drop_pieces(stream);
  if (stream->is_ended) {
    stream->status = DI_END;
    if (*stream->reason == 0) strcpy(stream->reason, "abort");
    return;
  }
  if (stream->is_cancelled) return;
  stream->is_cancelled = true;
  strcpy(stream->reason, "abort");
  if (stream->client->is_welcome) say(stream->client, "cancel", stream->id, NULL, 0, NULL, 0);
}

void di_stream_free(di_stream *stream) {
  if (stream == NULL) return;
  di_cancel(stream);
  stream->is_freed = true;
  drop_pieces(stream);
  if (stream->is_ended) destroy(stream);
}

const char *di_stream_id(const di_stream *stream) { return stream->id; }

const di_error *di_stream_error(const di_stream *stream) { return &stream->error; }

di_summary di_stream_summary(const di_stream *stream) {
  di_summary summary = stream->summary;
  summary.reason = *stream->reason != 0 ? stream->reason : NULL;
  return summary;
}
