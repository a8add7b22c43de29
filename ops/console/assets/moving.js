/** Moving over the log: by steps, to a time, to what a person typed, and by playing it. */
import { effect, untracked } from './library.js';
import { ask } from './api.js';
import * as format from './format.js';
import * as state from './state.js';

let stepping = false;

const WORDS = { message: 'message', decision: 'decision', request: 'request', fleet: 'fleet event' };

/** Goes to the next or previous event of a kind. A step that is on its way is waited for: held keys queue nothing. */
export async function step(by, direction) {
  const at = state.position.peek();
  if (stepping || at === null) return;
  stepping = true;
  try {
    const found = await ask('step', { at, by, direction });
    state.learnTime(found);
    state.goTo(found.position, 'replace');
    if (by === 'request' && found.request && state.view.peek() === 'request') state.adjust({ id: found.request }, 'replace');
    if (by === 'decision' && state.view.peek() === 'decision') state.adjust({ id: '' }, 'replace');
    state.message.value = `Position ${format.integer(found.position)}: ${found.what || WORDS[by]}`;
  } catch (error) {
    const end = direction > 0 ? 'next' : 'earlier';
    state.message.value = error.status === 404 ? `There is no ${end} ${WORDS[by]} in the log.` : error.message;
  } finally {
    stepping = false;
  }
}

/** Goes to the newest position stored by a time. */
export async function goToTime(milliseconds, how = 'push') {
  try {
    const found = await ask('position', { time_ms: Math.round(milliseconds) });
    state.learnTime(found);
    state.goTo(found.position, how);
  } catch (error) {
    state.message.value = error.message;
  }
}

/**
 * Reads what a person typed: a position ("12,345"), a time of day ("14:03" or "14:03:22.5") of the log's latest day,
 * a date and time, a time before the newest one ("-5m"), or a bookmark's name. Returns {position}, {time} or null.
 */
export function readMoment(text, log = state.log.peek()) {
  const typed = text.trim();
  if (/^[\d, _]+$/.test(typed) && /\d/.test(typed)) return { position: Number(typed.replace(/\D/g, '')) };
  const bookmark = log?.bookmarks?.[typed];
  if (bookmark !== undefined) return { position: bookmark };
  const before = /^-(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)$/.exec(typed);
  if (before && log) return { time: log.last_ms - Number(before[1]) * { ms: 1, s: 1000, m: 60_000, min: 60_000, h: 3_600_000 }[before[2]] };
  const clock = /^(\d{1,2}):(\d{2})(?::(\d{2})(\.\d+)?)?$/.exec(typed);
  if (clock && log) return { time: latestTime(log.last_ms, clock) };
  const date = /\d{4}-\d{2}-\d{2}/.test(typed) ? Date.parse(typed.replace(' ', 'T')) : NaN;
  return Number.isNaN(date) ? null : { time: date };
}

/** The latest moment with this time of day that the log may hold. */
function latestTime(newest, [, hours, minutes, seconds = '0', fraction = '0']) {
  const moment = new Date(newest);
  moment.setHours(Number(hours), Number(minutes), Number(seconds), Math.round(Number(fraction) * 1000));
  if (moment.getTime() > newest + 60_000) moment.setDate(moment.getDate() - 1);
  return moment.getTime();
}

/** Goes to what a person typed; says so if it cannot be read. */
export function goToTyped(text) {
  const wanted = readMoment(text);
  if (!wanted) state.message.value = 'Type a position (12345), a time (14:03:22), a date and time, or a time before now (-5m).';
  else if (wanted.position !== undefined) state.goTo(wanted.position);
  else goToTime(wanted.time);
}

/** How often a played log moves (ms). */
const FRAME = 250;

/** Plays the log from the position shown; at its end it is followed. */
async function play(stopped) {
  let time = state.moment.peek().time;
  if (state.live.peek() || time === null) return;
  while (!stopped() && state.playing.peek()) {
    const began = performance.now();
    time += FRAME * state.speed.peek();
    const log = state.log.peek();
    if (time >= log.last_ms) {
      if (log.live) state.goLive();
      else state.goTo(log.last, 'replace');
      state.playing.value = false;
      return;
    }
    const before = state.position.peek();
    try {
      const found = await ask('position', { time_ms: Math.round(time) });
      if (stopped()) return;
      if (state.position.peek() !== before) time = state.moment.peek().time ?? time;
      else state.goTo(Math.max(found.position, before), 'replace');
    } catch (error) {
      state.message.value = error.message;
      state.playing.value = false;
    }
    await new Promise((resolve) => setTimeout(resolve, Math.max(0, FRAME - (performance.now() - began))));
  }
}

effect(() => {
  if (!state.playing.value) return undefined;
  let stopped = false;
  untracked(() => play(() => stopped));
  return () => {
    stopped = true;
  };
});
