/** The messages of the log before the position; a row opens all fields of its event. */
import { classes, html, useRef, useSignal, useState } from '../library.js';
import { ask } from '../api.js';
import { useAnswer, useAnswerHere } from '../answers.js';
import { goToTime } from '../moving.js';
import { Empty, PositionLink, RequestLink, Select, SmallTable, TextField, Time, View, WorkerLink } from '../parts.js';
import { Table } from '../table.js';
import * as format from '../format.js';
import * as state from '../state.js';

const PAGE = 200;
const KINDS = ['fleet', 'route', 'req', 'load', 'kv'];
const KIND_OPTIONS = [{ value: '', label: 'Any' }, ...KINDS.map((kind) => ({ value: kind, label: kind }))];
const DIRECTIONS = [{ value: '', label: 'before the position' }, { value: 'after', label: 'after the position' }];

const COLUMNS = [
  { name: 'position', label: 'Position', align: 'right', render: (event) => html`<${Place} event=${event} />` },
  { name: 'time', label: 'Time', render: (event) => html`<${Time} value=${event.time_ms} precise=${true} />` },
  { name: 'event', label: 'Event', render: (event) => html`<button type="button" class="event-name" onClick=${() => open(event)}><span class=${`kind kind-${event.kind}`}>${event.event}</span></button>` },
  { name: 'writer', label: 'Writer', wide: true, className: 'clip', render: (event) => html`<span class="code">${event.writer}</span>` },
  { name: 'text', label: 'What happened', className: 'clip-long', render: (event) => event.text },
];

/** Events of requests are in a log of their own, with positions of its own. */
const ofRequests = (event) => event.kind === 'req';

const keyOf = (event) => `${ofRequests(event) ? 'req-' : ''}${event.position}-${event.index}`;

/** Where an event is stored; one of the request log is gone to by its time. */
function Place({ event }) {
  if (!ofRequests(event)) return html`<${PositionLink} position=${event.position} />`;
  return html`<button type="button" class="event-name number" title=${`Position ${event.position} of the request log: go to its time`} onClick=${() => goToTime(event.time_ms)}>req ${format.integer(event.position)}</button>`;
}

function open(event) {
  state.adjust({ open: keyOf(event) }, 'replace');
}

function Field({ name, value }) {
  const deep = value !== null && typeof value === 'object';
  return html`<tr><th scope="row">${name}</th><td>${deep ? html`<pre class="field-value">${JSON.stringify(value, null, 1)}</pre>` : html`<span class="code">${value === null ? 'null' : String(value)}</span>`}</td></tr>`;
}

function Details({ event }) {
  const close = () => state.adjust({ open: '' }, 'replace');
  return html`<aside class="event-detail panel" aria-label="Fields of the event">
    <header class="panel-header"><h2>${event.event}</h2><div class="actions"><button type="button" onClick=${close}>Close</button></div></header>
    <p>${event.text}</p>
    <p class="finding-links">
      <span>Position <${Place} event=${event} />${event.index ? `, event ${event.index}` : ''}</span><span><${Time} value=${event.time_ms} precise=${true} /></span>
      <span>Writer <span class="code">${event.writer}</span>, epoch ${format.integer(event.epoch)}</span>
      ${event.request ? html`<span>Request <${RequestLink} id=${event.request} /></span>` : null}
      ${event.worker ? html`<span>Worker <${WorkerLink} name=${event.worker} /></span>` : null}
    </p>
    <div class="field-table"><${SmallTable} label="Fields" headings=${[['Field'], ['Value']]}>
      ${Object.entries(event.fields || {}).map(([name, value]) => html`<${Field} key=${name} name=${name} value=${value} />`)}
    <//></div>
  </aside>`;
}

/** The event that is opened: among those loaded, or asked for. */
function useOpened(identifier, events) {
  const loaded = events.find((event) => keyOf(event) === identifier);
  const position = identifier && !identifier.startsWith('req-') ? Number(identifier.split('-')[0]) : null;
  const asked = useAnswer('events', position !== null && !loaded ? { at: position, limit: 20 } : null);
  return loaded || (identifier && asked.data?.events.find((event) => keyOf(event) === identifier));
}

/** Those nearest to the position first. */
function inOrder(events, direction) {
  const sign = direction === 'after' ? 1 : -1;
  return [...events].sort((a, b) => sign * (a.time_ms - b.time_ms || a.position - b.position || a.index - b.index));
}

/** The position from which to read on: the two logs are merged by time, so it is found by time, and overlaps by a message. */
async function edgeOf(last, direction) {
  const found = await ask('position', { time_ms: last.time_ms });
  return state.within(state.log.peek(), found.position + (direction === 'after' ? -1 : 1));
}

/** Events of the first answer and those loaded after it. */
function useOlder(answer, question) {
  const [older, setOlder] = useState({ base: null, events: [], more: false });
  const loading = useRef(false);
  const base = answer.data;
  const current = older.base === base ? older : { events: [], more: base?.more };
  const load = async () => {
    const events = [...inOrder(base?.events || [], question.direction), ...current.events];
    if (loading.current || !current.more || !events.length) return;
    loading.current = true;
    if (state.live.peek()) {
      state.goTo(state.position.peek(), 'replace');
      state.message.value = 'Paused, so that the list stays where it is.';
    }
    try {
      const next = await ask('events', { ...question, at: await edgeOf(events[events.length - 1], question.direction) });
      const known = new Set(events.map(keyOf));
      const added = inOrder(next.events, question.direction).filter((event) => !known.has(keyOf(event)));
      setOlder({ base, events: [...current.events, ...added], more: next.more && added.length > 0 });
    } catch (error) {
      state.message.value = error.message;
    } finally {
      loading.current = false;
    }
  };
  return { events: base ? [...inOrder(base.events, question.direction), ...current.events] : [], more: current.more, load };
}

function Filters({ values }) {
  return html`<div class="filters" role="search" aria-label="Filter events">
    <${TextField} label="Text" filter=${true} value=${values.text || ''} placeholder="in any field" onChange=${(text) => state.adjust({ text }, 'replace')} />
    <${Select} label="Kind" value=${values.kind || ''} options=${KIND_OPTIONS} onChange=${(kind) => state.adjust({ kind })} />
    <${TextField} label="Event" value=${values.event || ''} placeholder="route.decided" onChange=${(event) => state.adjust({ event }, 'replace')} />
    <${TextField} label="Writer" value=${values.writer || ''} placeholder="router-0" onChange=${(writer) => state.adjust({ writer }, 'replace')} />
    <${Select} label="Show" value=${values.direction || ''} options=${DIRECTIONS} onChange=${(direction) => state.adjust({ direction })} />
  </div>`;
}

/** The view. */
export function Events() {
  const values = useSignal(state.parameters);
  const question = { direction: values.direction || 'before', kind: values.kind, event: values.event, writer: values.writer, text: values.text, limit: PAGE };
  const answer = useAnswerHere('events', question);
  const { events, more, load } = useOlder(answer, question);
  const opened = useOpened(values.open, events);
  const after = question.direction === 'after';
  return html`<${View} title="Events" subtitle=${after ? 'Messages of the log after the position' : 'Messages of the log up to the position, newest first'} answer=${answer} controls=${html`<${Filters} values=${values} />`}>
    <div class=${classes('events', opened && 'events-with-detail')}>
      <div class="events-list">
        <${Table} label="Events" columns=${COLUMNS} rows=${events} keyOf=${keyOf} onOpen=${open} onEnd=${load} isSelected=${(event) => keyOf(event) === values.open}
          empty=${html`<${Empty} title="No event matches.">Change the filters, or move to another position.<//>`} />
        ${more ? html`<p><button type="button" onClick=${load}>Load ${after ? 'later' : 'older'} events</button></p>` : null}
      </div>
      ${opened ? html`<${Details} event=${opened} />` : null}
    </div>
  <//>`;
}
