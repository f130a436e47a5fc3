/**
 * The client's side of the wire, without IO: calls, frames and the time (ms) go in, frames and chunks come out.
 * docs/wire.md, "A client in short".
 */

import { WireError, decodeServer, encode } from './codec.js';
import { ConnectionLost, ConnectionRejected, ServerError } from './errors.js';
import type { TokenStream } from './stream.js';
import type { ClientMessage, Delta, ErrorMessage, Finish, Pong, Reject, Submit, Welcome } from './types.js';

export const VERSION = 1;
const E_HELLO = 7;
const E_NOT_FOUND = 14;
const SILENT_PINGS = 3;
/** How often HELLO is said while no server has told its `ping_ms`. */
const HELLO_MS = 1000;

/** One open request. */
interface Call {
  readonly id: string;
  /** Its SUBMIT, to be said again byte for byte. */
  readonly frame: Uint8Array;
  readonly stream: TokenStream;
  window: number;
  readonly isResumable: boolean;
  isCancelled: boolean;
  /** A RESUME is under way: what follows the gap comes again. */
  isResuming: boolean;
  /** Tokens that the server may have sent. */
  limit: number;
  /** Deltas received. */
  numDeltas: number;
}

export interface Settings {
  /** 16 to 64 random characters, a secret. */
  session: string;
  token: string;
  /** Name and version, for people. */
  name: string;
  /** How long the server may be out of reach before open streams fail. */
  giveUpMs: number;
}

export class Session {
  /** The last one. */
  welcome: Welcome | null = null;
  pong: Pong | null = null;
  rejection: ConnectionRejected | null = null;
  /** The last REJECT after which HELLO is said again; null once there is a WELCOME. */
  refusal: ConnectionRejected | null = null;
  isWelcome = false;
  /** The server goes away: until when open streams may run. */
  deadlineAt: number | null = null;
  numReconnects = 0;

  private readonly calls = new Map<string, Call>();
  private frames: Uint8Array[] = [];
  /** When the first PING was said that nothing has answered yet. */
  private askedAt = Infinity;
  private saidAt = -Infinity;
  private lostAt = Infinity;
  private helloNotBefore = -Infinity;

  constructor(private readonly settings: Settings) {}

  /** What is to be sent, in order. */
  takeFrames(): Uint8Array[] {
    const frames = this.frames;
    this.frames = [];
    return frames;
  }

  // ---- what the user does

  /** Say who we are: at the start, and again whenever the server does not know us. */
  hello(now: number): void {
    if (this.rejection !== null || now < this.helloNotBefore) return;
    this.saidAt = now;
    this.lostAt = Math.min(this.lostAt, now);
    const { session, token, name } = this.settings;
    this.say({ kind: 'hello', min_version: VERSION, max_version: VERSION, session, client: name, token });
  }

  has(id: string): boolean {
    return this.calls.has(id);
  }

  /** As much of a window as a stream can use: a server waits for acks, which come when half of it was read. */
  usable(window: number): number {
    return Math.max(Math.min(window, this.welcome?.limits.max_unacked_tokens ?? Infinity), 2);
  }

  /** Throws `WireError` for what is no SUBMIT. */
  submit(submit: Submit, stream: TokenStream, window: number): void {
    const frame = encode(submit);
    this.calls.set(submit.id, {
      id: submit.id,
      frame,
      stream,
      window,
      isResumable: submit.resumable ?? false,
      isCancelled: false,
      isResuming: false,
      limit: window,
      numDeltas: 0,
    });
    if (this.isWelcome) this.frames.push(frame);
  }

  /** The stream ends with the server's FINISH; at once where the server is out of reach, which hears of it later. */
  cancel(id: string): void {
    const call = this.calls.get(id);
    if (call === undefined || call.isCancelled) return;
    call.isCancelled = true;
    if (this.isWelcome) {
      this.say({ kind: 'cancel', id });
    } else {
      call.stream.reason = 'abort';
      call.stream.close(null);
    }
  }

  /** The user of a stream has read on: let it go on when half of its window is used. */
  read(id: string): void {
    const call = this.calls.get(id);
    if (call === undefined || call.isCancelled || !this.isWelcome) return;
    const limit = call.stream.numRead + call.window;
    if (limit - call.limit >= call.window / 2) {
      call.limit = limit;
      this.say({ kind: 'credit', id, limit, ack: call.numDeltas });
    }
  }

  bye(): void {
    if (this.isWelcome) this.say({ kind: 'bye' });
    this.isWelcome = false;
  }

  /** The server cannot be reached, or does not know this connection. What was to be sent is void: WELCOME renews it. */
  lose(now: number): void {
    this.frames = [];
    this.askedAt = Infinity;
    if (this.isWelcome) {
      this.isWelcome = false;
      this.lostAt = now;
    }
    this.hello(now);
  }

  failAll(error: Error): void {
    for (const call of [...this.calls.values()]) this.end(call, error);
  }

  // ---- what the server says

  /** A message came. What is none is skipped: a gap that it leaves shows by the next one. */
  receive(parts: readonly Uint8Array[], now: number): void {
    const [frame] = parts;
    if (frame === undefined || parts.length !== 1) return;
    let message;
    try {
      message = decodeServer(frame);
    } catch (error) {
      if (error instanceof WireError) return;
      throw error;
    }
    this.askedAt = Infinity;
    switch (message.kind) {
      case 'delta':
        return this.onDelta(message);
      case 'finish':
        return this.onFinish(message);
      case 'error':
        return this.onError(message, now);
      case 'welcome':
        return this.onWelcome(message, now);
      case 'reject':
        return this.onReject(message, now);
      case 'pong':
        this.pong = message;
        return;
      case 'goaway':
        this.deadlineAt = now + message.deadline_ms;
        return;
    }
  }

  private onDelta(delta: Delta): void {
    const call = this.calls.get(delta.id);
    if (call === undefined || call.isCancelled || delta.seq < call.numDeltas) return;
    if (delta.seq > call.numDeltas) return this.resume(call);
    call.isResuming = false;
    call.numDeltas += 1;
    const { sample, index, token_ids, text, logprobs, reason, stop } = delta;
    call.stream.push({ sample, index, token_ids, text, logprobs, reason, stop });
  }

  private onFinish(finish: Finish): void {
    const call = this.calls.get(finish.id);
    if (call === undefined) return;
    if (finish.seq > call.numDeltas && !call.isCancelled) return this.resume(call);
    call.stream.reason = finish.reason;
    call.stream.usage = finish.usage;
    call.stream.timings = finish.timings;
    this.end(call, null);
  }

  private onError(error: ErrorMessage, now: number): void {
    if (error.code === E_HELLO) {
      if (this.isWelcome) this.lose(now); // else a HELLO is under way
      return;
    }
    const call = this.calls.get(error.id);
    if (call === undefined) return;
    if (error.seq > call.numDeltas && error.code !== E_NOT_FOUND && !call.isCancelled) return this.resume(call);
    this.end(call, error.code === E_NOT_FOUND ? new ConnectionLost(error.text) : new ServerError(error));
  }

  private onWelcome(welcome: Welcome, now: number): void {
    const isSame = this.welcome === null || this.welcome.engine === welcome.engine;
    if (this.welcome !== null) this.numReconnects += 1;
    this.welcome = welcome;
    this.refusal = null;
    this.isWelcome = true;
    this.deadlineAt = null;
    this.lostAt = Infinity;
    this.saidAt = now;
    for (const call of [...this.calls.values()]) {
      call.isResuming = false;
      if (call.isCancelled) this.say({ kind: 'cancel', id: call.id });
      else if (call.numDeltas === 0) this.resubmit(call);
      else if (isSame && call.isResumable) this.resume(call);
      else this.end(call, new ConnectionLost('the stream was lost with the connection'));
    }
  }

  private onReject(reject: Reject, now: number): void {
    const rejection = new ConnectionRejected(reject);
    if (reject.retryable) {
      this.refusal = rejection;
      this.helloNotBefore = now + reject.retry_after_ms;
      return;
    }
    this.rejection = rejection;
    this.isWelcome = false;
    this.failAll(rejection);
  }

  /** The server may have got it before: the same bytes. It may be another one, with less room. */
  private resubmit(call: Call): void {
    call.window = call.limit = this.usable(call.window);
    this.frames.push(call.frame);
  }

  private resume(call: Call): void {
    if (!call.isResumable) {
      this.say({ kind: 'cancel', id: call.id });
      this.end(call, new ConnectionLost('a part of the stream was lost'));
    } else if (!call.isResuming) {
      call.isResuming = true;
      call.limit = Math.max(call.limit, call.stream.numRead + call.window);
      this.say({ kind: 'resume', id: call.id, next: call.numDeltas, limit: call.limit });
    }
  }

  // ---- time

  /** To be called a few times a second. */
  tick(now: number): void {
    const pingMs = this.welcome?.limits.ping_ms ?? HELLO_MS;
    if (!this.isWelcome) {
      if (now - this.saidAt >= pingMs) this.hello(now);
      if (now - this.lostAt > this.settings.giveUpMs) {
        this.failAll(new ConnectionLost(`the server was out of reach for ${this.settings.giveUpMs} ms`));
      }
    } else if (now - this.askedAt > SILENT_PINGS * pingMs) {
      this.lose(now);
    } else if (now - this.saidAt >= pingMs) {
      this.saidAt = now;
      this.askedAt = Math.min(this.askedAt, now);
      this.say({ kind: 'ping' });
    }
  }

  // ---- bookkeeping

  private end(call: Call, error: Error | null): void {
    this.calls.delete(call.id);
    call.stream.reason ??= call.isCancelled ? 'abort' : null;
    call.stream.close(call.isCancelled ? null : error);
  }

  private say(message: ClientMessage): void {
    this.frames.push(encode(message));
  }
}
