/** Follows the log: pools, its ends, new positions while it grows, the fleet at the position shown, and marks for the slider. */
import { effect, signal, untracked } from './library.js';
import { NewestAnswer } from './answers.js';
import { ApiError, ask, follow } from './api.js';
import * as state from './state.js';

/** The answer of /api/fleet at the position shown: several views, the palette and the filters use it. */
export const fleet = signal({ data: null, error: null, loading: true });
/** Joins and ends of workers over the whole log: marks of the slider. */
export const logMarks = signal([]);
/** Why the page cannot start. */
export const startProblem = signal(null);

const fleetAnswer = new NewestAnswer((answer) => {
  fleet.value = answer;
});
const RECONNECT_DELAYS = [500, 1000, 2000, 5000];
const MARKS_PERIOD = 15_000;

let session = null;

/** Loads pools, then follows the log of the pool in the address, or of the first. */
export async function start() {
  startProblem.value = null;
  try {
    const site = await ask('pools');
    state.site.value = site;
    if (!site.pools.some((one) => one.pool === state.pool.peek())) state.pool.value = site.pools[0]?.pool ?? '';
  } catch (error) {
    if (error.name !== 'AbortError') startProblem.value = error;
    return;
  }
  if (!session) followPool();
}

/** Asks again for everything, as after a token was given. */
export async function restart() {
  await start();
  if (state.site.peek()) openPool(state.pool.peek());
  fleetAnswer.retry();
}

/** Follows whichever pool is chosen. What following reads must not start it again. */
function followPool() {
  effect(() => {
    const name = state.pool.value;
    untracked(() => openPool(name));
  });
}

function openPool(name) {
  session?.abort();
  session = new AbortController();
  if (name) followLog(session.signal);
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener('abort', () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

/** Reads the log's ends, then its new positions, and starts again whenever that breaks. */
async function followLog(signal) {
  let failures = 0;
  state.connection.value = 'connecting';
  while (!signal.aborted) {
    try {
      const answer = await ask('log', {}, signal);
      const log = { ...answer, live: answer.live ?? state.site.peek()?.live ?? true };
      state.log.value = log;
      startProblem.value = null;
      loadMarks(signal);
      if (!log.live) {
        state.connection.value = 'file';
        return;
      }
      await readNewPositions(log, signal, () => (failures = 0));
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && !error.passing) startProblem.value = error;
      if (error.status === 401) return;
    }
    state.connection.value = 'lost';
    await pause(RECONNECT_DELAYS[Math.min(failures, RECONNECT_DELAYS.length - 1)], signal);
    failures += 1;
  }
}

/** A page that nobody sees asks for nothing: it goes on once it is seen. */
async function readNewPositions(log, signal, wellReceived) {
  state.connection.value = 'following';
  let latest = null;
  const apply = () => {
    if (latest && !document.hidden) state.log.value = { ...state.log.peek(), ...latest };
  };
  document.addEventListener('visibilitychange', apply, { signal });
  await follow('live', { after: log.last }, (news) => {
    wellReceived();
    latest = news;
    apply();
  }, signal);
}

let marksTimer = 0;

/** Marks of the whole log, asked for now and then. */
async function loadMarks(signal) {
  clearTimeout(marksTimer);
  const log = state.log.peek();
  if (signal.aborted || !log) return;
  try {
    const seconds = Math.max(1, Math.ceil((log.last_ms - log.first_ms) / 1000) + 1);
    const answer = await ask('series', { at: state.newest(log), window_s: seconds, columns: 2 }, signal);
    logMarks.value = answer.marks;
  } catch {
    // The slider works without marks.
  }
  if (log.live) marksTimer = setTimeout(() => loadMarks(signal), MARKS_PERIOD);
}

effect(() => {
  const position = state.position.value;
  if (state.pool.value && position !== null) untracked(() => fleetAnswer.want('fleet', { at: position }));
});

/** Asks for the fleet again, as after a command. */
export function refreshFleet() {
  fleetAnswer.retry();
}

/** The shared answer in the form of `useAnswer`. */
export function withRetry(answer) {
  return { ...answer, retry: refreshFleet };
}
