/** The bar that is always visible: the slider over the log, the position, its time, playing and following. */
import { classes, html, useEffect, useLayoutEffect, useRef, useSignal, useState, useTyped } from './library.js';
import { colour, markColour } from './colours.js';
import { drawnOrder } from './charts.js';
import { Select } from './parts.js';
import { logMarks } from './following.js';
import { goToTyped, step } from './moving.js';
import * as format from './format.js';
import * as state from './state.js';

/** How much of the log the slider spans: the whole, or a part around the position. */
const ZOOMS = [1, 4, 16, 64, 256];

/** The first and last position that the slider reaches. */
function span(log, position, zoom) {
  const size = Math.max(1, log.last - log.first);
  if (zoom === 1) return { first: log.first, last: log.last };
  const length = Math.max(100, Math.round(size / zoom));
  const first = Math.max(log.first, Math.min(log.last - length, Math.round(position - length / 2)));
  return { first, last: Math.min(log.last, first + length) };
}

/** The time of a position as text; "≈" where it is only estimated from the ends of the log. */
function positionTime(position, moment, log) {
  if (moment.position === position) return { text: format.dateTime(moment.time), title: format.utc(moment.time) };
  if (log?.last_ms && position === log.last) return { text: format.dateTime(log.last_ms), title: format.utc(log.last_ms) };
  if (!log?.last_ms || log.last === log.first) return { text: format.UNKNOWN, title: '' };
  const share = (position - log.first) / (log.last - log.first);
  const estimate = log.first_ms + share * (log.last_ms - log.first_ms);
  return { text: `≈ ${format.dateTime(estimate)}`, title: 'Estimated from the ends of the log' };
}

/** Marks on the slider's ground: fleet events, snapshots, what is not folded yet. */
function drawGround(canvas, { bounds, log, marks }) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  const place = (position) => 8 + ((position - bounds.first) / Math.max(1, bounds.last - bounds.first)) * (width - 16);
  const line = (position, style, top, length) => {
    if (position < bounds.first || position > bounds.last) return;
    context.fillStyle = style;
    context.fillRect(Math.round(place(position)) - 0.75, top, 1.5, length);
  };
  if (log.indexed_from > bounds.first) {
    context.fillStyle = colour('grid');
    context.fillRect(8, height - 5, place(Math.min(bounds.last, log.indexed_from)) - 8, 3);
  }
  for (const position of log.snapshots || []) line(position, colour('hatch'), height - 6, 6);
  for (const mark of drawnOrder(marks)) line(mark.position, markColour(mark.kind), 0, 9);
  for (const position of Object.values(log.bookmarks || {})) line(position, colour('accent'), 0, height);
}

function Ground({ bounds, log }) {
  const canvas = useRef();
  const marks = useSignal(logMarks);
  const theme = useSignal(state.dark);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const element = canvas.current;
    const watched = new ResizeObserver(() => setWidth(element.clientWidth));
    watched.observe(element);
    return () => watched.disconnect();
  }, []);
  useLayoutEffect(() => drawGround(canvas.current, { bounds, log, marks }), [bounds.first, bounds.last, log.indexed_from, marks, theme, width]);
  return html`<canvas ref=${canvas} class="slider-ground" aria-hidden="true"></canvas>`;
}

/** A text field that shows the position and takes a position or a time. */
function PositionField({ position }) {
  const { form, field } = useTyped(format.integer(position), goToTyped);
  return html`<form class="position-field" ...${form}>
    <label for="position-field">Position</label>
    <input id="position-field" class="number" type="text" inputmode="text" autocomplete="off" title="A position, a time (14:03:22), or a time before now (-5m)" ...${field} />
  </form>`;
}

function StepButtons() {
  const button = (by, direction, sign, key) => {
    const label = `${direction > 0 ? 'Next' : 'Previous'} ${by}`;
    return html`<button type="button" class="icon-button" aria-label=${label} title=${`${label} (${key})`} onClick=${() => step(by, direction)}>${sign}</button>`;
  };
  return html`<span class="group" role="group" aria-label="Step by message">${button('message', -1, '‹', '[')}${button('message', 1, '›', ']')}</span>
    <span class="group step-decision" role="group" aria-label="Step by decision">${button('decision', -1, '«', 'D')}${button('decision', 1, '»', 'd')}</span>`;
}

const CONNECTIONS = {
  connecting: 'Connecting to the log.', following: 'New positions arrive as they are stored.', lost: 'The connection to the console is lost; the page tries again.',
  file: 'This is a recorded log: it does not grow.',
};

function LiveButton() {
  const live = useSignal(state.live);
  const connection = useSignal(state.connection);
  const file = connection === 'file';
  const text = file ? 'Newest' : connection === 'lost' ? 'Offline' : 'Live';
  return html`<button type="button" class=${classes('live-button', live && 'live-on', `connection-${connection}`)} aria-pressed=${live} title=${`${CONNECTIONS[connection]} Follow the newest position (l)`} onClick=${state.goLive}>
    <span class="live-dot" aria-hidden="true"></span>${text}
  </button>`;
}

function PlayButtons() {
  const playing = useSignal(state.playing);
  const live = useSignal(state.live);
  const speed = useSignal(state.speed);
  const toggled = () => {
    if (live) state.goTo(state.position.peek(), 'replace');
    else state.playing.value = !playing;
  };
  const label = live ? 'Pause' : playing ? 'Stop playing' : 'Play';
  const options = [1, 5, 20, 100].map((value) => ({ value, label: `${value}×` }));
  return html`<button type="button" class="icon-button play" aria-label=${label} title=${`${label} (p)`} onClick=${toggled}><span class=${live || playing ? 'icon-pause' : 'icon-play'} aria-hidden="true"></span></button>
    <span class="speed"><${Select} label="Speed" hidden=${true} value=${speed} options=${options} onChange=${(value) => (state.speed.value = Number(value))} /></span>`;
}

/** Copies the link to what is shown, with its position. */
export async function copyLink() {
  const link = state.permanentLink();
  try {
    await navigator.clipboard.writeText(link);
    state.message.value = `The link to position ${format.integer(state.position.peek())} is copied.`;
  } catch {
    state.goTo(state.position.peek());
    state.message.value = 'The clipboard is closed to this page; the address bar now holds the link.';
  }
}

function Range({ bounds, position, label }) {
  const dragged = (event) => state.goTo(Number(event.currentTarget.value), 'replace');
  const released = (event) => state.goTo(Number(event.currentTarget.value), 'push');
  const keyed = (event) => {
    // Arrow keys of the slider move by a message, whatever its step; the page keys would jump by a tenth.
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -bounds.size / 20, PageUp: bounds.size / 20 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    state.goTo(Math.round(position + moves[event.key]), 'replace');
  };
  return html`<input type="range" id="position-slider" aria-label="Position in the log" aria-valuetext=${label} min=${bounds.first} max=${bounds.last} step="1"
    value=${position} onInput=${dragged} onChange=${released} onKeyDown=${keyed} />`;
}

/** The whole bar. */
export function TimeBar() {
  const log = useSignal(state.log);
  const position = useSignal(state.position);
  const moment = useSignal(state.moment);
  const [zoom, setZoom] = useState(1);
  const holder = useRef(null);
  if (!log || position === null) return html`<div class="time-bar" aria-busy="true"><span class="muted">Reading the log</span></div>`;
  const kept = holder.current;
  const fits = kept && kept.zoom === zoom && zoom > 1 && position > kept.bounds.first && position < kept.bounds.last;
  const bounds = fits ? kept.bounds : span(log, position, zoom);
  holder.current = { zoom, bounds };
  const size = bounds.last - bounds.first;
  const { text, title } = positionTime(position, moment, log);
  const options = ZOOMS.map((value) => ({ value, label: value === 1 ? 'Whole log' : `1/${value} of log` }));
  return html`<div class="time-bar" role="group" aria-label="Position in the log">
    <div class="time-controls">
      <${PlayButtons} /><${StepButtons} />
    </div>
    <div class="slider">
      <${Ground} bounds=${bounds} log=${log} />
      <${Range} bounds=${{ ...bounds, size }} position=${position} label=${`Position ${format.integer(position)}, ${text}`} />
    </div>
    <div class="time-labels">
      <${PositionField} position=${position} />
      <span class="position-time number" title=${title}>${text}</span>
    </div>
    <div class="time-actions">
      <span class="zoom"><${Select} label="Slider spans" hidden=${true} value=${zoom} options=${options} onChange=${(value) => setZoom(Number(value))} /></span>
      <button type="button" class="copy-link" onClick=${copyLink} title="Copy a link to this view at this position (c)">Copy link</button>
      <${LiveButton} />
    </div>
  </div>`;
}
