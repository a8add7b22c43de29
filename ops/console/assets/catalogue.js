/** The views by name: title, key after `g`, and whether it stands in the navigation. */
import { Overview } from './views/overview.js';
import { Fleet } from './views/fleet.js';
import { Requests } from './views/requests.js';
import { Request } from './views/request.js';
import { Decision } from './views/decision.js';
import { Tree } from './views/tree.js';
import { Queue } from './views/queue.js';
import { Stuck } from './views/stuck.js';
import { Rates } from './views/rates.js';
import { Events } from './views/events.js';
import { Diff } from './views/diff.js';
import { Replicas } from './views/replicas.js';

/** In the order of the navigation. `main` ones stand in the bar of a narrow screen. */
export const VIEWS = [
  { name: 'overview', title: 'Overview', key: 'o', component: Overview, main: true },
  { name: 'fleet', title: 'Fleet', key: 'f', component: Fleet, main: true },
  { name: 'requests', title: 'Requests', key: 'r', component: Requests, main: true },
  { name: 'decision', title: 'Why here', key: 'w', component: Decision, main: true },
  { name: 'tree', title: 'Prefix tree', key: 't', component: Tree },
  { name: 'queue', title: 'Queue and hand-offs', key: 'q', component: Queue },
  { name: 'stuck', title: 'Stuck requests', key: 's', component: Stuck },
  { name: 'rates', title: 'Rates and latencies', key: 'l', component: Rates },
  { name: 'events', title: 'Events', key: 'e', component: Events },
  { name: 'diff', title: 'Difference', key: 'd', component: Diff },
  { name: 'replicas', title: 'Replicas', key: 'p', component: Replicas },
  { name: 'request', title: 'Request', hidden: true, component: Request },
];

/** The view with this name, or the first. */
export function viewNamed(name) {
  return VIEWS.find((one) => one.name === name) || VIEWS[0];
}
