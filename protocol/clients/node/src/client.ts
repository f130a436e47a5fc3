/** Client: a server's engine, from here. The thin shell around `Session`: a socket and a clock. */

import { randomBytes } from 'node:crypto';
import { performance } from 'node:perf_hooks';

import { Dealer } from 'zeromq';

import { ClientClosed, ConnectionLost } from './errors.js';
import { Session } from './session.js';
import { TokenStream } from './stream.js';
import { MAX_FRAME_BYTES } from './structure.js';
import type { Chunk, Logprob, Pong, Reason, Request, Sampling, Timings, Usage, Welcome } from './types.js';

const NAME = 'deepinfer-node 0.1.0';
const TICK_MS = 100;
/** How soon HELLO is tried again while ZeroMQ still connects. */
const RETRY_MS = 50;
const FAREWELL_MS = 500;

/** Keys of 40 characters (Z85), as `deepinfer keygen` writes them. */
export interface Curve {
  serverKey: string;
  publicKey: string;
  secretKey: string;
}

export interface Options {
  /** Where the server asks for one. */
  token?: string;
  /** Where the server has keys. */
  curve?: Curve;
  /** How long `connect` waits. A server with keys says nothing to a stranger. */
  timeoutMs?: number;
  /** How long the server may be out of reach before open streams fail with `ConnectionLost`. */
  giveUpMs?: number;
  /** How many tokens may be ahead of what was read. */
  window?: number;
}

export interface StreamOptions {
  /** Ends the request when it is aborted. */
  signal?: AbortSignal;
}

/** One sample, whole. */
export interface Sample {
  text: string;
  token_ids: number[];
  logprobs: Logprob[] | null;
  reason: Reason | null;
  stop: string | number | null;
}

export interface Completion {
  id: string;
  /** Of the first sample. */
  text: string;
  samples: Sample[];
  reason: Reason | null;
  usage: Usage | null;
  timings: Timings | null;
}

export type Prompt = string | readonly number[] | Int32Array | Request;

/**
 * A client of the server at `url`, welcomed. Throws `ConnectionRejected`, also where the server had no room (`retryable`)
 * for as long as this waits, and `ConnectionLost` where nobody answers.
 */
export async function connect(url: string, options: Options = {}): Promise<Client> {
  const client = new Client(url, options);
  try {
    await client.opened;
  } catch (error) {
    client.close();
    throw error;
  }
  return client;
}

export class Client {
  /** For `connect`: when there is a WELCOME. */
  readonly opened: Promise<void>;

  private readonly socket: Dealer;
  private readonly session: Session;
  private readonly window: number;
  private readonly ticking: NodeJS.Timeout;
  private retrying: NodeJS.Timeout | undefined;
  private isClosed = false;
  private settle: () => void = () => {};

  /** Use `connect`. */
  constructor(
    readonly url: string,
    options: Options,
  ) {
    const { token = '', curve, timeoutMs = 10_000, giveUpMs = 30_000, window = 1024 } = options;
    if (!Number.isInteger(window) || window < 2 || window > 2 ** 20) {
      throw new RangeError(`window: ${window}, 2 to ${2 ** 20} is expected`);
    }
    if (curve !== undefined) checkKeys(curve);
    this.window = window;
    this.session = new Session({ session: randomBytes(24).toString('base64url'), token, name: NAME, giveUpMs });
    this.socket = new Dealer({
      linger: 0,
      immediate: true, // nothing waits in a pipe that leads nowhere
      ipv6: true,
      sendTimeout: 0,
      maxMessageSize: MAX_FRAME_BYTES,
      reconnectInterval: 50,
      reconnectMaxInterval: 1000,
      heartbeatInterval: 1000,
      heartbeatTimeout: 5000,
    });
    try {
      if (curve !== undefined) {
        this.socket.curveServerKey = curve.serverKey;
        this.socket.curvePublicKey = curve.publicKey;
        this.socket.curveSecretKey = curve.secretKey;
      }
      this.socket.connect(url);
      this.session.hello(performance.now());
    } catch (error) {
      this.socket.close();
      throw error;
    }
    this.opened = this.welcomed(timeoutMs);
    this.ticking = setInterval(() => this.tick(), TICK_MS);
    void this.receive();
    this.flush();
  }

  /** What the server said of itself, its model and its limits. */
  get welcome(): Welcome {
    if (this.session.welcome === null) throw new ClientClosed('the client is not open');
    return this.session.welcome;
  }

  /** What the server last said of its engine's progress. */
  get pong(): Pong | null {
    return this.session.pong;
  }

  /**
   * The server goes away: for how many more milliseconds open streams may run. It takes no further request. Null: it
   * does not.
   */
  get deadlineMs(): number | null {
    const { deadlineAt } = this.session;
    return deadlineAt === null ? null : Math.max(deadlineAt - performance.now(), 0);
  }

  get isConnected(): boolean {
    return this.session.isWelcome;
  }

  get numReconnects(): number {
    return this.session.numReconnects;
  }

  /** The tokens of a request, as they come. Throws `WireError` for what is no request; reading throws `ServerError`. */
  stream(prompt: Prompt, sampling?: Sampling, { signal }: StreamOptions = {}): TokenStream {
    if (this.isClosed) throw new ClientClosed('the client is closed');
    if (this.session.rejection !== null) throw this.session.rejection;
    const request = asRequest(prompt);
    const id = request.id ?? randomBytes(8).toString('hex');
    if (this.session.has(id)) throw new RangeError(`id: ${id} is open already`);
    const window = this.session.usable(this.window);
    const stop = () => this.cancel(id);
    const stream = new TokenStream(id, () => this.read(id), stop);
    this.session.submit(
      {
        kind: 'submit',
        ...request,
        resumable: request.resumable ?? true,
        sampling: portable({ ...request.sampling, ...sampling }),
        id,
        credit: window,
      },
      stream,
      window,
    );
    this.flush();
    if (signal !== undefined) listen(signal, stream);
    return stream;
  }

  /** All samples of one request, whole. */
  async generate(prompt: Prompt, sampling?: Sampling, options?: StreamOptions): Promise<Completion> {
    const stream = this.stream(prompt, sampling, options);
    const samples: Sample[] = [];
    for await (const chunk of stream) add(samples, chunk);
    const { id, reason, usage, timings } = stream;
    return { id, text: samples[0]?.text ?? '', samples, reason, usage, timings };
  }

  /** End the request of this id, if it is open. */
  cancel(id: string): void {
    if (this.isClosed) return;
    this.session.cancel(id);
    this.flush();
  }

  /** End every open stream, and the connection. */
  close(): void {
    if (this.isClosed) return;
    clearInterval(this.ticking);
    clearTimeout(this.retrying);
    const wasWelcome = this.session.isWelcome;
    this.session.takeFrames();
    this.session.bye();
    this.flush();
    this.isClosed = true;
    this.session.failAll(new ClientClosed('the client is closed'));
    this.socket.linger = wasWelcome ? FAREWELL_MS : 0;
    this.socket.close();
    this.settle();
  }

  // ---- in and out

  private welcomed(timeoutMs: number): Promise<void> {
    return new Promise((resolve, reject) => {
      const timer = setTimeout(
        () => reject(this.session.refusal ?? new ConnectionLost(`${this.url}: no answer in ${timeoutMs} ms`)),
        timeoutMs,
      );
      this.settle = () => {
        if (this.session.rejection !== null) reject(this.session.rejection);
        else if (this.session.isWelcome) resolve();
        else if (this.isClosed) reject(new ClientClosed('the client is closed'));
        else return;
        clearTimeout(timer);
        this.settle = () => {};
      };
    });
  }

  private async receive(): Promise<void> {
    try {
      for await (const parts of this.socket) {
        this.session.receive(parts, performance.now());
        this.flush();
        this.settle();
      }
    } catch (error) {
      if (!this.isClosed) this.session.failAll(error as Error);
    }
  }

  private read(id: string): void {
    if (this.isClosed) return;
    this.session.read(id);
    this.flush();
  }

  private tick(): void {
    this.session.tick(performance.now());
    this.flush();
  }

  /** Send what is due. What cannot be sent is lost with the connection, which is made again. */
  private flush(): void {
    if (this.isClosed) return;
    for (const frame of this.session.takeFrames()) this.socket.send(frame).catch(() => this.unsent());
  }

  private unsent(): void {
    if (this.isClosed) return;
    if (this.session.isWelcome) {
      this.session.lose(performance.now());
      this.session.takeFrames();
    }
    if (this.retrying !== undefined) return;
    this.retrying = setTimeout(() => {
      this.retrying = undefined;
      if (this.session.isWelcome) return;
      this.session.hello(performance.now());
      this.flush();
    }, RETRY_MS);
  }
}

/** Without one of them ZeroMQ would make a connection in plain text. */
function checkKeys(curve: Curve): void {
  for (const name of ['serverKey', 'publicKey', 'secretKey'] as const) {
    if (!curve[name]) throw new RangeError(`${name}: all three keys are needed, or no curve`);
  }
}

function listen(signal: AbortSignal, stream: TokenStream): void {
  if (signal.aborted) return stream.cancel();
  const abort = () => stream.cancel();
  signal.addEventListener('abort', abort);
  stream.onReadOut = () => signal.removeEventListener('abort', abort);
}

function asRequest(prompt: Prompt): Request {
  if (typeof prompt === 'string') return { prompt };
  if (prompt instanceof Int32Array || Array.isArray(prompt)) return { token_ids: prompt };
  return prompt as Request;
}

/** A schema goes as text: it may be deeper than a message. */
function portable(sampling: Sampling): Sampling {
  const { json_schema: schema } = sampling;
  return typeof schema === 'object' && schema !== null ? { ...sampling, json_schema: JSON.stringify(schema) } : sampling;
}

function add(samples: Sample[], chunk: Chunk): void {
  while (samples.length <= chunk.sample) {
    samples.push({ text: '', token_ids: [], logprobs: null, reason: null, stop: null });
  }
  const sample = samples[chunk.sample] as Sample;
  sample.text += chunk.text;
  sample.token_ids.push(...chunk.token_ids);
  if (chunk.logprobs !== null) (sample.logprobs ??= []).push(...chunk.logprobs);
  sample.reason ??= chunk.reason;
  sample.stop ??= chunk.stop;
}
