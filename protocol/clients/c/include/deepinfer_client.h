/*
 * Streams tokens from a DeepInfer server, over its client wire (docs/wire.md).
 *
 * Nothing runs behind your back: the connection is served while di_next or di_poll is running, and only then does it
 * say that it lives. One client belongs to one thread. Names and defaults are those of the wire. The process ends where
 * there is no memory for what was received.
 */
#ifndef DEEPINFER_CLIENT_H
#define DEEPINFER_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct di_client di_client;
typedef struct di_stream di_stream;

typedef enum di_status {
  DI_OK = 0,
  DI_END = 1,      /* the stream has ended */
  DI_TIMEOUT = 2,  /* nothing came in time; ask again */
  DI_INVALID = -1, /* it cannot be written on the wire: `field` says which */
  DI_REFUSED = -2, /* the server said so: `code`, one of docs/wire.md, and `field` */
  DI_LOST = -3,    /* the server is out of reach, or was restarted */
  DI_SYSTEM = -4   /* ZeroMQ or memory */
} di_status;

typedef struct di_error {
  int32_t code;     /* of the server; 0: none */
  char name[64];    /* such as E_INVALID_PARAM */
  char field[256];  /* the parameter at fault, such as sampling.top_p; may be empty */
  char text[1024];  /* for people */
  bool retryable;   /* the same request may succeed later, */
  int32_t retry_after_ms; /* not before this */
} di_error;

typedef struct di_options {
  const char *token;      /* where the server asks for one */
  const char *server_key; /* CURVE, Z85 of 40 characters: all three or none */
  const char *public_key;
  const char *secret_key;
  int32_t timeout_ms; /* how long di_connect waits */
  int32_t give_up_ms; /* how long the server may be out of reach before streams end with DI_LOST */
  int32_t window;     /* tokens that may be ahead of what was read, 2 to 2^20 */
} di_options;

/* Token ids; NULL: not given, which is not the same as none. */
typedef struct di_ids {
  const int32_t *data;
  size_t size;
} di_ids;

typedef struct di_bias {
  int32_t token_id;
  double bias;
} di_bias;

typedef struct di_sampling {
  int64_t max_tokens; /* -1: until the context ends */
  int64_t min_tokens;
  double temperature; /* 0 is greedy */
  double top_p;
  int64_t top_k;
  double min_p;
  double repetition_penalty;
  double presence_penalty;
  double frequency_penalty;
  const di_bias *logit_bias;
  size_t num_logit_bias;
  di_ids allowed_token_ids;
  di_ids banned_token_ids;
  const char *const *bad_words;
  size_t num_bad_words;
  const char *json_schema; /* JSON; the output is JSON that it accepts. At most one of this and the next three */
  const char *regex;       /* the whole output matches it */
  const char *const *choice; /* the output is one of these */
  size_t num_choice;
  const char *grammar; /* in Lark's notation */
  int64_t n;
  const char *const *stop;
  size_t num_stop;
  di_ids stop_token_ids;
  bool include_stop_str_in_output;
  bool ignore_eos;
  int64_t logprobs; /* -1: none */
  int64_t seq_seed; /* -1: none */
  bool keep_special_tokens;
  bool skip_reading_prefix_cache;
  bool no_text; /* token ids only */
} di_sampling;

typedef struct di_chat {
  const char *role;
  const char *content;
} di_chat;

/* One msgpack value, ready made. */
typedef struct di_packed {
  const void *data;
  size_t size;
} di_packed;

/* Exactly one of prompt, token_ids, chat and messages is given. */
typedef struct di_request {
  const char *id; /* new in this client; NULL: made up */
  const char *prompt;
  di_ids token_ids;
  const di_chat *chat;
  size_t num_chat;
  di_packed messages; /* as chat, with all that OpenAI's chat has: an array of maps */
  di_sampling sampling;
  int thinking; /* -1: the model's default; 0, 1 */
  const char *reasoning_effort;
  di_packed tools;
  di_packed tool_choice;
  int32_t priority; /* lower goes first */
  int32_t queue_timeout_ms; /* -1: none */
  int32_t timeout_ms;       /* -1: none */
  bool not_resumable; /* once something of it has come, the stream ends with its connection */
  const char *traceparent; /* what your own trace calls this request: W3C Trace Context */
} di_request;

typedef struct di_top {
  int32_t token_id;
  double logprob;
} di_top;

typedef struct di_logprob {
  int32_t token_id;
  double logprob;
  int32_t rank; /* 1 is the most probable */
  const di_top *top;
  size_t num_top;
} di_logprob;

/* What is new of one sample. Valid until the next call for its stream. */
typedef struct di_chunk {
  int32_t sample;
  int32_t index; /* place of the first token among the sample's */
  const int32_t *token_ids;
  size_t num_tokens;
  const char *text; /* new text, UTF-8, ends with a NUL that does not count */
  size_t text_size;
  const di_logprob *logprobs; /* one a token, or NULL */
  const char *reason;     /* on the last chunk of a sample, else NULL: "stop", "length", "abort", ... */
  const char *stop_text;  /* with "stop": the text that ended it, or NULL */
  int32_t stop_token;     /* with "stop": the token that ended it, or -1 */
} di_chunk;

typedef struct di_summary {
  const char *reason; /* of the first sample; NULL before the end */
  int32_t prompt_tokens, cached_tokens, generated_tokens, preemptions;
  int64_t first_token_us, total_us;
} di_summary;

typedef struct di_server {
  char engine[1025], server[1025], model[1025];
  int32_t vocab_size, max_length;
  bool has_tokenizer, has_chat;
  int32_t max_streams, retention_ms, max_unacked_tokens, ping_ms, idle_ms;
} di_server;

/* The defaults. */
di_options di_options_default(void);
di_request di_request_default(void);

/* Connect and be welcomed. `options` may be NULL, `error` too. */
di_status di_connect(const char *url, const di_options *options, di_client **client, di_error *error);
/* End every stream and the connection. All streams must have been freed. */
void di_close(di_client *client);

/* Ask. The stream is freed by di_stream_free, in any state. */
di_status di_submit(di_client *client, const di_request *request, di_stream **stream, di_error *error);
/* The next chunk, waiting for `timeout_ms` (-1: for ever). After DI_OK `chunk` is filled in. */
di_status di_next(di_stream *stream, int timeout_ms, di_chunk *chunk);
/* End a request: di_next gives DI_END once the server has said so; what was not read is dropped. */
void di_cancel(di_stream *stream);
/* Also cancels, if it has not ended. */
void di_stream_free(di_stream *stream);

const char *di_stream_id(const di_stream *stream);
const di_error *di_stream_error(const di_stream *stream);
di_summary di_stream_summary(const di_stream *stream);

/* Serve the connection for a while without reading. */
void di_poll(di_client *client, int timeout_ms);
const di_server *di_client_server(const di_client *client);
bool di_client_is_connected(const di_client *client);
/* The server goes away, and takes no further request: for how long open streams may run. -1: it does not. */
int32_t di_client_deadline_ms(const di_client *client);
int32_t di_client_reconnects(const di_client *client);

#ifdef __cplusplus
}
#endif
#endif
