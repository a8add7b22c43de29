/** Answers that follow what is wanted: the newest question wins, one is on its way at a time, the last picture stays. */
import { useEffect, useRef, useSignal, useState } from './library.js';
import { ask, questionAddress } from './api.js';
import { learnTime, live, position } from './state.js';

/** While live, a view is asked for at most this often (ms). */
const LIVE_PERIOD = 900;
/** One of a longer window changes less, and costs more: it is asked for once per hundredth of its window, up to this (ms). */
const LIVE_PERIOD_MAX = 5000;
/** After a failure that passes, ask again after so many milliseconds. */
const RETRY_DELAYS = [1000, 2000, 5000];

/** One place of the page that shows the answer to one question at a time. */
export class NewestAnswer {
  constructor(publish) {
    this.publish = publish;
    this.wanted = null;
    this.running = null;
    this.answered = '';
    this.timer = 0;
    this.started = 0;
    this.failures = 0;
    this.state = { data: null, error: null, loading: true };
  }

  /** States what to show. A question on its way is only given up if it is about something else than another position. */
  want(path, values) {
    const key = questionAddress(path, values);
    if (key === this.wanted?.key) return;
    const { at, ...others } = values;
    this.wanted = { path, values, key, subject: questionAddress(path, others) };
    this.failures = 0;
    if (this.running && this.running.question.subject !== this.wanted.subject) this.abort();
    this.proceed();
  }

  /** Asks the same again. */
  retry() {
    this.answered = '';
    this.failures = 0;
    this.proceed();
  }

  /** Gives up what is on its way. */
  abort() {
    this.running?.abort.abort();
    this.running = null;
  }

  /** Ends: nothing is published after this. */
  stop() {
    clearTimeout(this.timer);
    this.wanted = null;
    this.abort();
    this.publish = () => {};
  }

  proceed() {
    clearTimeout(this.timer);
    if (this.running || !this.wanted || this.wanted.key === this.answered) return;
    const period = Math.min(LIVE_PERIOD_MAX, Math.max(LIVE_PERIOD, (this.wanted.values.window_s || 0) * 10));
    const wait = live.peek() && this.state.data ? this.started + period - performance.now() : 0;
    if (wait > 0) {
      this.timer = setTimeout(() => this.proceed(), wait);
      return;
    }
    this.start(this.wanted);
  }

  async start(question) {
    const running = { question, abort: new AbortController() };
    this.running = running;
    this.started = performance.now();
    this.update({ loading: true });
    try {
      const data = await ask(question.path, question.values, running.abort.signal);
      if (this.running !== running) return;
      this.failures = 0;
      if (question.values.at !== undefined && question.path !== 'decision') learnTime(data);
      this.finish(question, { data, error: null, loading: false, question: question.key });
    } catch (error) {
      if (this.running === running) this.fail(question, error);
    }
  }

  finish(question, state) {
    this.running = null;
    this.answered = question.key;
    this.update(state);
    this.proceed();
  }

  fail(question, error) {
    if (error.name === 'AbortError') {
      this.running = null;
      return;
    }
    this.finish(question, { error, loading: false });
    if (!error.passing || this.answered !== this.wanted?.key) return;
    const delay = RETRY_DELAYS[Math.min(this.failures, RETRY_DELAYS.length - 1)];
    this.failures += 1;
    this.timer = setTimeout(() => {
      this.answered = '';
      this.proceed();
    }, delay);
  }

  update(change) {
    this.state = { ...this.state, ...change };
    this.publish(this.state);
  }
}

/** The newest answer to a question, as {data, error, loading, retry}; nothing is asked while `values` is null. */
export function useAnswer(path, values) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const holder = useRef(null);
  if (!holder.current) holder.current = new NewestAnswer(setState);
  useEffect(() => () => holder.current.stop(), []);
  useEffect(() => {
    if (values) holder.current.want(path, values);
  });
  return { ...state, retry: () => holder.current.retry() };
}

/** The newest answer to a question at the position shown; nothing is asked while `values` is null. */
export function useAnswerHere(path, values) {
  const at = useSignal(position);
  return useAnswer(path, values && at !== null ? { at, ...values } : null);
}

/**
 * What is known of a request or a decision at the position. The request log may have its end before the pool's log has a newer position:
 * while live, all that is known is asked for, again and again until `settled(data)`.
 */
export function useKnown(path, values, settled) {
  const following = useSignal(live);
  const at = useSignal(position);
  const answer = useAnswer(path, values && { ...values, ...(following ? {} : { at }) });
  useEffect(() => {
    if (following && values && !(answer.data && settled(answer.data))) answer.retry();
  }, [at]);
  return answer;
}
