// Held locks: count the remaining time down, and fetch the rows anew every few seconds.
'use strict';
{
    const live = document.getElementById('redlock-live');
    const body = () => document.querySelector('#result_list tbody');
    const rows = (root) => Array.from(root ? root.rows : []);
    const id = (row) => row.querySelector('[data-lock]')?.dataset.lock;
    const state = (row) => row.querySelector('.redlock-state')?.textContent;
    const name = (row) => row.querySelector('.redlock-name')?.textContent;
    const still = window.matchMedia('(prefers-reduced-motion: reduce)');
    const two = (number) => String(number).padStart(2, '0');

    function clock(seconds) {
        const s = Math.floor(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
        return h ? `${h}:${two(m % 60)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
    }

    function tick() {
        for (const cell of document.querySelectorAll('[data-left]')) {
            // Rows of the first page count from the start of its request, so that nothing is promised too long.
            const age = (performance.now() - (cell.dataset.asked || 0)) / 1000;
            const left = Math.max(0, cell.dataset.left - age);
            cell.querySelector('time').textContent = clock(left);
            const bar = cell.querySelector('progress');
            if (bar) { bar.value = left; }
        }
    }

    // While something is ticked or focused, rows keep their places: nobody should tick the wrong lock.
    const busy = () => body().contains(document.activeElement) || body().querySelector('input:checked');

    function refresh(row, fresh) {
        const tickbox = (each) => each.querySelector('.action-select');
        const same = tickbox(row)?.value === tickbox(fresh)?.value;
        row.classList.remove('redlock-gone');
        Array.from(row.cells).forEach((cell, i) => {
            if (!cell.contains(tickbox(row)) || !same) { cell.replaceWith(fresh.cells[i].cloneNode(true)); }
        });
        if (!same) { row.classList.remove('selected'); }
    }

    function merge(html, asked) {
        const page = new DOMParser().parseFromString(html, 'text/html');
        const fresh = rows(page.querySelector('#result_list tbody'));
        if (!body()) {
            if (fresh.length) { window.location.reload(); }
            return;
        }
        page.querySelectorAll('[data-left]').forEach((cell) => { cell.dataset.asked = asked; });
        const known = new Map(rows(body()).map((row) => [id(row), row]));
        const news = [];
        const hold = busy();
        for (const row of fresh) {
            const old = known.get(id(row));
            known.delete(id(row));
            if (old) {
                const before = state(old);
                refresh(old, row);
                if (before !== state(old)) { news.push(`${name(old)}: ${state(old)}`); }
            }
            if (!hold) { body().append(old || row); }
        }
        for (const row of known.values()) {
            if (!row.classList.contains('redlock-gone')) { news.push(`${name(row)}: ${say.dataset.gone}`); }
            if (hold) { row.classList.add('redlock-gone'); } else { row.remove(); }
        }
        if (news.length) { say.textContent = news.join(', '); }
    }

    async function update() {
        const asked = performance.now();
        const status = live.querySelector('.redlock-asof');
        try {
            const reply = await fetch(live.dataset.url + window.location.search, {headers: {Accept: 'application/json'}});
            if (reply.redirected || reply.status === 403) {
                status.textContent = status.dataset.out;
                return;
            }
            const data = await reply.json();
            live.querySelector('.redlock-nodes').innerHTML = data.nodes;
            // While too few nodes answer nobody knows of any lock, so the rows stay as they were last known.
            if (data.known) { merge(data.rows, asked); }
            status.textContent = data.known ? '' : status.dataset.unknown;
            tick();
        } catch {
            status.textContent = status.dataset.failed;
        }
    }

    const say = live?.querySelector('[aria-live]');
    if (live) {
        const pause = live.querySelector('.redlock-pause');
        let paused = false, asking = false;
        pause.hidden = false;
        pause.addEventListener('click', () => {
            paused = !paused;
            pause.textContent = paused ? pause.dataset.resume : pause.dataset.pause;
        });
        setInterval(async () => {
            if (paused || asking || document.hidden) { return; }
            asking = true;
            await update();
            asking = false;
        }, live.dataset.every * 1000);
        setInterval(() => { if (!document.hidden && !still.matches) { tick(); } }, 1000);
        tick();
    }
}
