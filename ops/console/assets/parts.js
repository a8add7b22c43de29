/** Small parts that all views share: links, badges, meters, tiles, and what a view shows when it has no data. */
import { classes, html, useEffect, useId, useRef, useSignal, useState } from './library.js';
import * as format from './format.js';
import * as state from './state.js';

/** A link to a view at the position that is shown, or at another. */
export function Link({ view, values, at, children, className, title }) {
  useSignal(state.live);
  useSignal(state.chosen);
  useSignal(state.windowSeconds);
  return html`<a href=${state.address(view, values, { at })} class=${className} title=${title}>${children}</a>`;
}

/** A link to a request. */
export function RequestLink({ id, length = 22 }) {
  if (!id) return format.UNKNOWN;
  return html`<${Link} view="request" values=${{ id }} className="code" title=${id}>${format.shortened(id, length)}<//>`;
}

/** A link that opens a worker's panel beside what is shown. */
export function WorkerLink({ name }) {
  const view = useSignal(state.view);
  const parameters = useSignal(state.parameters);
  if (!name) return format.UNKNOWN;
  const opened = (event) => {
    event.preventDefault();
    event.stopPropagation();
    state.adjust({ panel: name });
  };
  return html`<a href=${state.address(view, { ...parameters, panel: name })} onClick=${opened} title=${name}>${format.shortened(name, 28)}</a>`;
}

/** A position of the log that can be gone to. */
export function PositionLink({ position, label }) {
  const view = useSignal(state.view);
  const parameters = useSignal(state.parameters);
  if (!format.isNumber(position)) return format.UNKNOWN;
  const text = label ?? format.integer(position);
  return html`<a href=${state.address(view, parameters, { at: position })} class="number" title=${`Go to position ${format.integer(position)}`}>${text}</a>`;
}

/** A time of day, with the whole moment in UTC as title. */
export function Time({ value, precise = false }) {
  return html`<time dateTime=${format.utc(value)} title=${format.utc(value)} class="number">${precise ? format.preciseTime(value) : format.time(value)}</time>`;
}

/** A word with a colour that also has a shape, so that colour alone says nothing. */
export function Badge({ kind = 'neutral', children, title }) {
  return html`<span class=${`badge badge-${kind}`} title=${title}>${children}</span>`;
}

const STATE_KINDS = {
  ready: 'good', draining: 'warning', paused: 'warning', sleeping: 'neutral', ended: 'neutral', done: 'good', routing: 'info', prefill: 'info',
  handoff: 'info', decode: 'info', transferring: 'info', prefilled: 'info', abandoned: 'critical', error: 'critical', stop: 'good', length: 'good', cancelled: 'warning',
};

/** The state of a worker, request or hand-off. */
export function StateBadge({ state: name }) {
  return html`<${Badge} kind=${STATE_KINDS[name] || 'neutral'}>${name}<//>`;
}

/** A bar from 0 to a maximum, with its numbers beside it. A plain one warns of nothing when it is full. */
export function Meter({ value, maximum, text, label, plain = false }) {
  const known = format.isNumber(value) && format.isNumber(maximum) && maximum > 0;
  const share = known ? Math.max(0, Math.min(1, value / maximum)) : 0;
  const kind = plain ? '' : share > 0.95 ? 'meter-full' : share > 0.8 ? 'meter-high' : '';
  return html`<span class="meter-cell">
    <span class=${classes('meter', kind)} aria-hidden="true"><span class="meter-fill" style=${{ width: `${share * 100}%` }}></span></span>
    <span class="number meter-text"><span class="visually-hidden">${label} </span>${text}</span>
  </span>`;
}

/** A number with its name. */
export function Tile({ label, value, detail, kind }) {
  return html`<div class=${classes('tile', kind && `tile-${kind}`)}>
    <dt>${label}</dt>
    <dd><span class="tile-value number">${value}</span>${detail ? html`<span class="tile-detail">${detail}</span>` : null}</dd>
  </div>`;
}

/** Names and values as a list. */
export function Fields({ entries, className }) {
  return html`<dl class=${classes('fields', className)}>
    ${entries.filter(([, value]) => value !== undefined).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** Says that something is missing, and what to do. */
export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p>${children ? html`<p>${children}</p>` : null}</div>`;
}

/** A failure of the server, with a way to ask again. */
export function Problem({ error, retry }) {
  const advice = {
    403: 'Your token does not allow this. Ask the operator for a token with the scope that the message names.',
    404: 'Check the identifier or the position; the log may no longer hold it.',
    0: 'The page asks again by itself.',
  }[error.status];
  return html`<div class="problem" role="alert">
    <p><strong>${error.message}</strong></p>
    ${advice ? html`<p>${advice}</p>` : null}
    <button type="button" onClick=${retry}>Ask again</button>
  </div>`;
}

/** What the server says about an answer that is not the whole truth. */
export function Notice({ text }) {
  return text ? html`<p class="notice" role="note">${text}</p>` : null;
}

/** The frame of a view: heading, actions, controls, which are there from the start, and what stands for the content while there is none. */
export function View({ title, subtitle, actions, controls, answer, answers = [], children }) {
  const all = answer ? [answer, ...answers] : answers;
  const failed = all.find((one) => one.error);
  const missing = answer && !answer.data;
  return html`<section class="view" aria-labelledby="view-title">
    <header class="view-header">
      <div class="view-heading"><h1 id="view-title" tabindex="-1">${title}</h1>${subtitle ? html`<p class="subtitle">${subtitle}</p>` : null}</div>
      <div class="actions">${actions}</div>
    </header>
    ${controls}
    ${[...new Set(all.map((one) => one.data?.notice))].map((text) => html`<${Notice} key=${text} text=${text} />`)}
    ${failed ? html`<${Problem} error=${failed.error} retry=${failed.retry} />` : null}
    ${missing ? (failed ? null : html`<${Loading} />`) : children}
  </section>`;
}

/** Grey bars where the first answer will be. */
export function Loading() {
  return html`<div class="loading"><span class="visually-hidden">Loading</span>${[0, 1, 2, 3].map((key) => html`<div key=${key} class="skeleton"></div>`)}</div>`;
}

/** A titled part of a view. */
export function Panel({ title, note, actions, children, className }) {
  const id = useId();
  return html`<section class=${classes('panel', className)} aria-labelledby=${id}>
    <header class="panel-header"><h2 id=${id}>${title}</h2>${note ? html`<p class="panel-note">${note}</p>` : null}<div class="actions">${actions}</div></header>
    ${children}
  </section>`;
}

/** A choice with a visible label. */
export function Select({ label, value, options, onChange, hidden = false }) {
  const id = useId();
  return html`<span class="field">
    <label for=${id} class=${hidden ? 'visually-hidden' : ''}>${label}</label>
    <select id=${id} value=${value} onChange=${(event) => onChange(event.currentTarget.value)}>
      ${options.map((option) => html`<option key=${option.value} value=${option.value} selected=${String(option.value) === String(value)}>${option.label}</option>`)}
    </select>
  </span>`;
}

/** A text field; `onChange` is called when typing pauses. */
export function TextField({ label, value, onChange, placeholder, filter = false, type = 'search' }) {
  const id = useId();
  const [text, setText] = useState(value);
  const timer = useRef(0);
  const sent = useRef(value);
  useEffect(() => {
    if (value !== sent.current) setText(value);
    sent.current = value;
  }, [value]);
  const typed = (event) => {
    const wanted = event.currentTarget.value;
    setText(wanted);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      sent.current = wanted;
      onChange(wanted);
    }, 250);
  };
  return html`<span class="field">
    <label for=${id}>${label}</label>
    <input id=${id} type=${type} value=${text} placeholder=${placeholder} onInput=${typed} data-filter=${filter ? '' : undefined} autocomplete="off" spellcheck=${false} />
  </span>`;
}

/** The choice of the window before the position. */
export function WindowSelect() {
  const seconds = useSignal(state.windowSeconds);
  const known = state.WINDOWS.includes(seconds) ? state.WINDOWS : [...state.WINDOWS, seconds].sort((a, b) => a - b);
  const options = known.map((value) => ({ value, label: windowLabel(value) }));
  return html`<${Select} label="Window" value=${seconds} options=${options} onChange=${(value) => state.setWindow(Number(value))} />`;
}

/** A window's length in words. */
export function windowLabel(seconds) {
  if (seconds % 3600 === 0) return seconds === 3600 ? '1 hour' : `${seconds / 3600} hours`;
  return seconds % 60 === 0 ? (seconds === 60 ? '1 minute' : `${seconds / 60} minutes`) : `${seconds} seconds`;
}

/** A small table, which scrolls where it is wider than its place. Headings are [text, whether its column is of numbers]. */
export function SmallTable({ label, headings, children }) {
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${label}>
    <table class="compact" aria-label=${label}>
      <thead><tr>${headings.map(([text, right]) => html`<th key=${text} scope="col" class=${right ? 'right' : ''}>${text}</th>`)}</tr></thead>
      <tbody>${children}</tbody>
    </table>
  </div>`;
}

/** A modal dialog of the platform: it traps focus, closes on Escape and gives focus back. */
export function Dialog({ label, onClose, className, children }) {
  const element = useRef();
  useEffect(() => {
    const dialog = element.current;
    dialog.showModal();
    return () => dialog.close();
  }, []);
  const clicked = (event) => {
    if (event.target === element.current) onClose();
  };
  return html`<dialog ref=${element} class=${className} aria-label=${label} onClose=${onClose} onMouseDown=${clicked}>${children}</dialog>`;
}
