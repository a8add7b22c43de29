/** The panel of a worker beside the view: its state at the position, and commands for those who may give them. */
import { html, useEffect, useRef, useSignal, useState } from './library.js';
import { command } from './api.js';
import { fleet, refreshFleet } from './following.js';
import { Dialog, Fields, Link, Meter, Select, StateBadge, Time } from './parts.js';
import * as format from './format.js';
import * as state from './state.js';

/** What each command does, for the question before it. */
const COMMANDS = {
  drain: { label: 'Drain', text: 'It takes no new requests and finishes those in flight.', when: (worker) => worker.state === 'ready' },
  resume: { label: 'Resume', text: 'It takes new requests again.', when: (worker) => worker.state === 'draining' || worker.state === 'paused' },
  sleep: { label: 'Sleep', text: 'It frees the memory of its GPU. It takes no requests until it is woken, and its cache is lost.', when: (worker) => worker.state === 'ready' || worker.state === 'draining' },
  wake: { label: 'Wake', text: 'It takes its memory back and serves again.', when: (worker) => worker.state === 'sleeping' },
};

const ROLES = ['both', 'prefill', 'decode'].map((value) => ({ value, label: value }));

function close() {
  state.adjust({ panel: '' });
}

/** A command may last as long as the requests in flight: after this time (ms) the page no longer waits for it in a dialog. */
const PATIENCE = 1500;

/** Gives a command and says how it ended; `settled` is called when it ends, or lasts. */
async function give(worker, name, values, label, settled) {
  const timer = setTimeout(() => {
    state.message.value = `${worker.name}: ${label} has begun and goes on.`;
    settled('');
  }, PATIENCE);
  try {
    const answer = await command(worker.name, name, values);
    state.message.value = `${worker.name}: ${answer.detail || `${label} is done`}`;
    settled('');
  } catch (error) {
    state.message.value = `${worker.name}: ${error.message}`;
    settled(error.message);
  } finally {
    clearTimeout(timer);
    refreshFleet();
  }
}

/** Asks before a command, gives it, and shows why it failed. */
function Confirmation({ worker, name, onClose }) {
  const role = name === 'role';
  const [chosen, setChosen] = useState(worker.role);
  const [problem, setProblem] = useState('');
  const [busy, setBusy] = useState(false);
  const text = role ? 'It finishes the requests of its present role, then takes those of the new one.' : COMMANDS[name].text;
  const label = role ? 'Change the role' : COMMANDS[name].label;
  const confirmed = () => {
    setBusy(true);
    give(worker, name, role ? { role: chosen } : {}, label, (failed) => {
      setBusy(false);
      setProblem(failed);
      if (!failed) onClose();
    });
  };
  return html`<${Dialog} label=${`${label} ${worker.name}`} onClose=${onClose} className="confirmation">
    <h2>${label}: ${worker.name}</h2>
    <p>${text}</p>
    <p class="muted">The command acts now, whatever position is shown. It has ${format.integer(worker.requests)} requests in flight at that position.</p>
    ${role ? html`<${Select} label="New role" value=${chosen} options=${ROLES} onChange=${setChosen} />` : null}
    ${problem ? html`<p class="problem" role="alert">${problem}</p>` : null}
    <div class="actions"><button type="button" onClick=${onClose}>Cancel</button><button type="button" class="primary" disabled=${busy || (role && chosen === worker.role)} onClick=${confirmed}>${label}</button></div>
  <//>`;
}

function Commands({ worker }) {
  const [asked, setAsked] = useState('');
  const allowed = useSignal(state.site) && state.allowed('control');
  if (!allowed) return null;
  const names = Object.keys(COMMANDS).filter((name) => COMMANDS[name].when(worker));
  return html`<div class="commands" role="group" aria-label="Commands">
    ${names.map((name) => html`<button key=${name} type="button" onClick=${() => setAsked(name)}>${COMMANDS[name].label}</button>`)}
    <button type="button" onClick=${() => setAsked('role')}>Role</button>
    ${asked ? html`<${Confirmation} worker=${worker} name=${asked} onClose=${() => setAsked('')} />` : null}
  </div>`;
}

function State({ worker }) {
  const used = worker.total_blocks ? worker.used_blocks / worker.total_blocks : null;
  return html`<${Fields} entries=${[
    ['State', html`<${StateBadge} state=${worker.state} />`],
    ['Running', html`<${Meter} value=${worker.running} maximum=${worker.max_running} text=${`${format.integer(worker.running)} of ${format.integer(worker.max_running)}`} label="running" />`],
    ['KV cache in use', html`<${Meter} value=${worker.used_blocks} maximum=${worker.total_blocks} text=${format.percent(used)} label="KV" />`],
    ['KV blocks', `${format.integer(worker.used_blocks)} of ${format.integer(worker.total_blocks)}`],
    ['Waiting in the engine', format.integer(worker.waiting)],
    ['In flight by decisions', format.integer(worker.requests)],
    ['Queued prompt tokens', format.integer(worker.queued_tokens)],
    ['Cache hits', format.percent(worker.hit_rate)],
    ['Time between tokens', format.duration(worker.step_ms)],
    ['Pace', format.number(worker.pace)],
    ['Role', worker.role],
    ['Engine', worker.engine],
    ['Block size', `${format.integer(worker.block_size)} tokens`],
    ['Epoch', format.integer(worker.epoch)],
    ['Instance', worker.instance || format.UNKNOWN],
    ['Tier', worker.tier || format.UNKNOWN],
    ['Taints', worker.taints?.length ? worker.taints.join(', ') : format.UNKNOWN],
    ['LoRA adapters', worker.loras?.length ? `${worker.loras.join(', ')}${worker.lora_slots ? ` (${worker.lora_slots} slots)` : ''}` : format.UNKNOWN],
    ['Joined', html`<${Time} value=${worker.joined_ms} />`],
  ]} />`;
}

function Missing({ name, left }) {
  const end = left.find((one) => one.name === name);
  return html`<p>This worker is not in the fleet at the position shown.</p>
    ${end ? html`<p>It left at <${Time} value=${end.time_ms} />: ${end.reason}.</p>` : html`<p class="muted">Move the slider to a position at which it is.</p>`}`;
}

/** The panel; its worker is in the address. */
export function WorkerPanel() {
  const { panel } = useSignal(state.parameters);
  const answer = useSignal(fleet);
  const heading = useRef();
  useEffect(() => {
    if (panel) heading.current?.focus();
  }, [panel]);
  if (!panel || !answer.data) return null;
  const worker = answer.data.workers.find((one) => one.name === panel);
  return html`<aside class="worker-panel" aria-labelledby="worker-panel-title">
    <header class="panel-header"><h2 id="worker-panel-title" tabindex="-1" ref=${heading}>${panel}</h2><div class="actions"><button type="button" class="icon-button" aria-label="Close the worker’s panel" title="Close (Esc)" onClick=${close}>×</button></div></header>
    ${worker ? html`<${Commands} key=${panel} worker=${worker} /><${State} worker=${worker} />` : html`<${Missing} name=${panel} left=${answer.data.left} />`}
    <ul class="plain-list panel-links">
      <li><${Link} view="requests" values=${{ worker: panel }}>Its requests<//></li>
      <li><${Link} view="events" values=${{ writer: panel }}>Its events<//></li>
      <li><${Link} view="tree" values=${{ worker: panel }}>Its cached prefixes<//></li>
      <li><${Link} view="fleet" values=${{ text: panel }}>Its lane<//></li>
    </ul>
  </aside>`;
}
