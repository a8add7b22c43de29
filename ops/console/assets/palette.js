/** The palette and the help: everything that can be gone to, by typing some of its name. */
import { html, useEffect, useMemo, useRef, useSignal, useState } from './library.js';
import { Dialog } from './parts.js';
import { VIEWS } from './catalogue.js';
import { fleet } from './following.js';
import { KEYS, overlay } from './keyboard.js';
import { copyLink } from './slider.js';
import { goToTime, readMoment } from './moving.js';
import * as format from './format.js';
import * as state from './state.js';

/** How well a name answers to what is typed: its letters in order; 0 is not at all. */
export function score(name, typed) {
  const text = name.toLowerCase();
  const wanted = typed.toLowerCase();
  if (!wanted) return 1;
  const place = text.indexOf(wanted);
  if (place >= 0) return 100 - Math.min(50, place);
  let at = -1;
  for (const letter of wanted) {
    at = text.indexOf(letter, at + 1);
    if (at < 0) return 0;
  }
  return 10;
}

function typedEntries(typed) {
  const entries = [];
  const moment = readMoment(typed);
  if (moment?.position !== undefined) entries.push({ group: 'Position', name: `Go to position ${format.integer(moment.position)}`, act: () => state.goTo(moment.position) });
  if (moment?.time !== undefined) entries.push({ group: 'Time', name: `Go to ${format.dateTime(moment.time)}`, act: () => goToTime(moment.time) });
  if (/^[\w.:-]{6,}$/.test(typed) && /\d/.test(typed) && !moment) {
    const decision = /-\d+-\d+$/.test(typed);
    if (decision) entries.push({ group: 'Decision', name: `Open decision ${typed}`, act: () => state.show('decision', { id: typed }) });
    entries.push({ group: 'Request', name: `Open request ${typed}`, act: () => state.show('request', { id: typed }) });
  }
  if (typed.length > 1) entries.push({ group: 'Request', name: `Find “${typed}” in requests`, act: () => state.show('requests', { text: typed }) });
  return entries;
}

function fixedEntries(workers) {
  const views = VIEWS.filter((one) => !one.hidden).map((one) => ({ group: 'View', name: one.title, keys: `g ${one.key}`, act: () => state.show(one.name) }));
  const names = workers.map((worker) => ({ group: 'Worker', name: worker.name, act: () => state.adjust({ panel: worker.name }) }));
  const bookmarks = Object.entries(state.log.peek()?.bookmarks || {}).map(([name, position]) => ({ group: 'Bookmark', name, act: () => state.goTo(position) }));
  const actions = [
    { group: 'Action', name: 'Follow the newest position', keys: 'l', act: state.goLive },
    { group: 'Action', name: 'Copy a link to this moment', keys: 'c', act: copyLink },
    { group: 'Action', name: 'Use light colours', act: () => state.setTheme('light') },
    { group: 'Action', name: 'Use dark colours', act: () => state.setTheme('dark') },
    { group: 'Action', name: 'Use the colours of the system', act: () => state.setTheme('auto') },
    { group: 'Action', name: 'Show the keys', keys: '?', act: () => (overlay.value = 'help') },
  ];
  return [...views, ...names, ...bookmarks, ...actions];
}

function matches(typed, workers) {
  const fixed = fixedEntries(workers)
    .map((entry) => ({ entry, score: score(entry.name, typed) }))
    .filter((one) => one.score > 0);
  if (typed) fixed.sort((a, b) => b.score - a.score);
  const strong = fixed.filter((one) => one.score > 10 || !typed).map((one) => one.entry);
  const weak = fixed.filter((one) => one.score <= 10 && typed).map((one) => one.entry);
  return [...strong, ...typedEntries(typed), ...weak].slice(0, 40);
}

function PaletteList({ entries, chosen, choose }) {
  useEffect(() => {
    document.getElementById(`palette-${chosen}`)?.scrollIntoView({ block: 'nearest' });
  }, [chosen]);
  return html`<ul id="palette-list" role="listbox" aria-label="Matches" class="palette-list">
    ${entries.map((entry, index) => html`<li key=${`${entry.group} ${entry.name}`} id=${`palette-${index}`} role="option" aria-selected=${index === chosen} onClick=${() => choose(entry)}>
      <span class="palette-group">${entry.group}</span><span class="palette-name">${entry.name}</span>${entry.keys ? html`<kbd>${entry.keys}</kbd>` : null}
    </li>`)}
  </ul>`;
}

function Palette() {
  const [typed, setTyped] = useState('');
  const [chosen, setChosen] = useState(0);
  const field = useRef();
  const workers = useSignal(fleet).data?.workers || [];
  const entries = useMemo(() => matches(typed.trim(), workers), [typed, workers]);
  const close = () => (overlay.value = overlay.peek() === 'palette' ? '' : overlay.peek());
  useEffect(() => field.current.focus(), []);
  const choose = (entry) => {
    close();
    entry.act();
  };
  const keyed = (event) => {
    if (event.key === 'Enter' && entries[chosen]) {
      event.preventDefault();
      choose(entries[chosen]);
    } else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      const next = chosen + (event.key === 'ArrowDown' ? 1 : -1);
      setChosen((next + entries.length) % Math.max(1, entries.length));
    }
  };
  const input = (event) => {
    setTyped(event.currentTarget.value);
    setChosen(0);
  };
  return html`<${Dialog} label="Palette" onClose=${close} className="palette">
    <input ref=${field} type="text" role="combobox" aria-expanded="true" aria-controls="palette-list" aria-activedescendant=${entries.length ? `palette-${chosen}` : undefined} aria-label="Go to"
      placeholder="View, worker, request, position or time" value=${typed} onInput=${input} onKeyDown=${keyed} autocomplete="off" spellcheck=${false} />
    ${entries.length ? html`<${PaletteList} entries=${entries} chosen=${chosen} choose=${choose} />` : html`<p class="empty">Nothing has this name.</p>`}
  <//>`;
}

function Help() {
  const close = () => (overlay.value = '');
  const views = VIEWS.filter((one) => !one.hidden);
  return html`<${Dialog} label="Keys" onClose=${close} className="help">
    <header class="panel-header"><h2>Keys</h2><div class="actions"><button type="button" onClick=${close}>Close</button></div></header>
    <div class="help-columns">
      <table><caption>Everywhere</caption><tbody>${KEYS.map(([keys, text]) => html`<tr key=${keys}><th scope="row">${keys.split(' ').map((key) => html`<kbd key=${key}>${key}</kbd> `)}</th><td>${text}</td></tr>`)}</tbody></table>
      <table><caption>Views</caption><tbody>${views.map((one) => html`<tr key=${one.name}><th scope="row"><kbd>g</kbd> <kbd>${one.key}</kbd></th><td>${one.title}</td></tr>`)}</tbody></table>
    </div>
  <//>`;
}

/** What is open above the page. */
export function Overlay() {
  const open = useSignal(overlay);
  if (open === 'palette') return html`<${Palette} />`;
  return open === 'help' ? html`<${Help} />` : null;
}
