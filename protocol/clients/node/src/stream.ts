/** TokenStream: what one request brings, as an async iterable. Knows nothing of frames or connections. */

import type { Chunk, Reason, Timings, Usage } from './types.js';

export interface Reader {
  resolve(result: IteratorResult<Chunk, undefined>): void;
  reject(error: Error): void;
}

/** `for await (const chunk of stream)`. To leave the loop early ends the request. */
export class TokenStream implements AsyncIterableIterator<Chunk> {
  /** Of the first sample; null while it runs. */
  reason: Reason | null = null;
  /** What the request took; null before its end. */
  usage: Usage | null = null;
  timings: Timings | null = null;
  /** Tokens that were read. */
  numRead = 0;
  /** For the client: it has ended, and nothing of it is left to be read. */
  onReadOut: () => void = () => {};

  private readonly chunks: Chunk[] = [];
  private readonly readers: Reader[] = [];
  private isClosed = false;
  private error: Error | null = null;

  /** `onRead` is called after each chunk that was read, `onCancel` when nothing more is wanted. */
  constructor(
    readonly id: string,
    private readonly onRead: () => void,
    private readonly onCancel: () => void,
  ) {}

  /** End the request. The stream ends without an error; what was not yet read is dropped. */
  cancel(): void {
    this.chunks.length = 0;
    this.error = null;
    if (!this.isClosed) return this.onCancel();
    this.reason ??= 'abort';
    this.tellReadOut();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  next(): Promise<IteratorResult<Chunk, undefined>> {
    const chunk = this.chunks.shift();
    if (chunk !== undefined) {
      this.tellReadOut();
      return Promise.resolve(this.handed(chunk));
    }
    if (this.error !== null) {
      const error = this.error;
      this.error = null; // an iterator fails once
      this.tellReadOut();
      return Promise.reject(error);
    }
    if (this.isClosed) return Promise.resolve({ done: true, value: undefined });
    return new Promise((resolve, reject) => this.readers.push({ resolve, reject }));
  }

  return(): Promise<IteratorResult<Chunk, undefined>> {
    this.cancel();
    this.close(null);
    return Promise.resolve({ done: true, value: undefined });
  }

  /** For the client: a chunk came. */
  push(chunk: Chunk): void {
    if (this.isClosed) return;
    const reader = this.readers.shift();
    if (reader === undefined) this.chunks.push(chunk);
    else reader.resolve(this.handed(chunk));
  }

  /** For the client: nothing more comes. */
  close(error: Error | null): void {
    if (this.isClosed) return;
    this.isClosed = true;
    this.error = error;
    for (const reader of this.readers.splice(0)) {
      if (this.error === null) reader.resolve({ done: true, value: undefined });
      else {
        reader.reject(this.error);
        this.error = null;
      }
    }
    this.tellReadOut();
  }

  private tellReadOut(): void {
    if (this.isClosed && this.chunks.length === 0 && this.error === null) this.onReadOut();
  }

  private handed(chunk: Chunk): IteratorYieldResult<Chunk> {
    this.numRead += chunk.token_ids.length;
    this.onRead();
    return { done: false, value: chunk };
  }
}
