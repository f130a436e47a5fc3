// What a server says first, in tests.

export const limits = {
  max_frame_bytes: 4194304,
  max_streams: 8,
  retention_ms: 30000,
  max_unacked_tokens: 4096,
  ping_ms: 1000,
  idle_ms: 10000,
};
export const welcome = {
  kind: 'welcome',
  version: 1,
  engine: 'one',
  server: 's',
  model: 'm',
  vocab_size: 97,
  max_length: 100,
  limits,
};
