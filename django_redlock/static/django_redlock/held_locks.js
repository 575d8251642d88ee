// Held locks: count the remaining time down, and fetch rows, nodes and details anew every few seconds.
'use strict';
{
    const live = document.getElementById('redlock-live');
    const part = document.querySelector('[data-refresh]');
    const say = document.querySelector('.redlock-say');
    const status = document.querySelector('.redlock-asof');
    const pause = document.querySelector('.redlock-pause');
    const still = window.matchMedia('(prefers-reduced-motion: reduce)');
    const body = () => document.querySelector('#result_list tbody');
    const rows = (root) => Array.from(root ? root.rows : []);
    const id = (row) => row.querySelector('[data-lock]')?.dataset.lock || '';
    const alias = (row) => decodeURIComponent(id(row).split('/')[0]);
    const state = (row) => row.querySelector('.redlock-state')?.textContent;
    const name = (row) => row.querySelector('.redlock-name')?.textContent;
    const two = (number) => String(number).padStart(2, '0');
    // The server's time, as the page shows it: the browser may be in another time zone, or its clock be wrong.
    const at = (root) => root.querySelector('.redlock-taken')?.dataset.at;
    const SPOKEN = 3; // changes that are read out at once
    let paused = false, asking = false, updated = at(document), tickboxes = null;

    function clock(seconds) {
        const s = Math.floor(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
        return h ? `${h}:${two(m % 60)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
    }

    function tick() {
        for (const cell of document.querySelectorAll('[data-left]')) {
            if (cell.closest('.redlock-old')) { continue; }
            // Rows of the first page count from the start of its request, so that nothing is promised too long.
            const age = (performance.now() - (cell.dataset.asked || 0)) / 1000;
            const left = Math.max(0, cell.dataset.left - age);
            cell.querySelector('time').textContent = clock(left);
            const bar = cell.querySelector('progress');
            if (bar) { bar.value = left; }
            if (!left) { grown(cell.closest('tr')); } // it has ended, or been renewed since
        }
    }

    // What is no longer known looks so: grey, with a countdown that stands still, and the time when it was known.
    function grow(element, where) {
        if (element.classList.contains('redlock-old')) { return; }
        element.classList.add('redlock-old');
        const note = document.createElement('span');
        note.className = 'redlock-lastknown';
        note.textContent = `${(live || part).dataset.known} ${element.dataset.at || updated}`;
        where?.append(note);
    }
    const aged = () => grow(part, part.querySelector('.redlock-taken'));
    const grown = (row) => grow(row, row.querySelector('.redlock-state')?.parentElement);

    function selected(element) {
        const chosen = document.getSelection();
        return !chosen.isCollapsed && chosen.containsNode(element, true);
    }

    // Find the selected text of an element in its new content; return where the selection begins and ends there, in
    // characters, or undefined if the new content does not have the text, or the selection is not all in the element.
    function found(root, content) {
        const chosen = document.getSelection();
        const ends = [[chosen.anchorNode, chosen.anchorOffset], [chosen.focusNode, chosen.focusOffset]];
        if (!ends.every(([node]) => root.contains(node))) { return undefined; }
        const places = ends.map(([node, offset]) => {
            const before = document.createRange();
            before.setStart(root, 0);
            before.setEnd(node, offset);
            return before.toString().length;
        });
        const start = Math.min(...places), text = root.textContent.slice(start, Math.max(...places));
        const near = (place) => Math.abs(place - start);
        const [place] = [content.lastIndexOf(text, start), content.indexOf(text, start)].filter(
            (each) => each >= 0).sort((one, other) => near(one) - near(other));
        return place === undefined ? undefined : places.map((each) => each - start + place);
    }

    function select(root, places) {
        const ends = places.map((place) => {
            const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
            // Between two texts, a selection begins in the second one and ends in the first one.
            const least = place === Math.min(...places) ? place + 1 : place;
            let before = 0;
            while (walk.nextNode() && before + walk.currentNode.length < least) { before += walk.currentNode.length; }
            return [walk.currentNode, place - before];
        });
        document.getSelection().setBaseAndExtent(...ends.flat());
    }

    // Put new content in place, and leave the focus, the selected text and the scrolled tables where they were.
    function renew(root, fresh) {
        const stops = () => Array.from(root.querySelectorAll('a[href], button, [tabindex]'));
        const wide = () => Array.from(root.querySelectorAll('.redlock-wide'));
        const at = stops().indexOf(document.activeElement), scrolled = wide().map((each) => each.scrollLeft);
        const places = selected(root) && found(root, fresh.textContent);
        root.replaceChildren(...fresh.childNodes);
        if (places) { select(root, places); }
        wide().forEach((each, i) => { each.scrollLeft = scrolled[i] || 0; });
        if (at >= 0) { stops()[at]?.focus({preventScroll: true}); }
    }

    // Texts that a screen reader reads out when they change, each with the name of a node, an alias or a lock.
    const spoken = (root) => new Map(Array.from(root.querySelectorAll('[data-say]'), (each) => [
        each.dataset.say, each.textContent.trim().replace(/\s+/g, ' '),
    ]));
    const changes = (before, after) => Array.from(after).filter(([key, text]) => before.get(key) !== text).map(
        ([key, text]) => `${key}: ${text.replace(/\.$/, '')}`);

    function announce(news) {
        const more = news.length - SPOKEN;
        const rest = more > 0 ? `, ${say.dataset.more.replace('{n}', more)}` : '';
        if (news.length) { say.textContent = news.slice(0, SPOKEN).join(', ') + rest; }
    }

    // While something is ticked, focused or selected, rows keep their places: nobody should tick the wrong lock.
    const used = (element) => element.contains(document.activeElement) || selected(element);
    const busy = () => used(body()) || body().querySelector('input:checked');

    function refresh(row, fresh) {
        const tickbox = (each) => each.querySelector('.action-select');
        const same = tickbox(row)?.value === tickbox(fresh)?.value;
        row.classList.remove('redlock-gone', 'redlock-old');
        Array.from(row.cells).forEach((cell, i) => {
            if (!used(cell) && !cell.contains(tickbox(row)) || !same) { cell.replaceWith(fresh.cells[i].cloneNode(true)); }
        });
        if (!same) { row.classList.remove('selected'); }
    }

    function merge(data, asked, when, news) {
        const page = new DOMParser().parseFromString(data.rows, 'text/html');
        const fresh = rows(page.querySelector('#result_list tbody'));
        if (!body()) {
            if (fresh.length) { window.location.reload(); }
            return;
        }
        page.querySelectorAll('[data-left]').forEach((cell) => { cell.dataset.asked = asked; });
        const known = new Map(rows(body()).map((row) => [id(row), row]));
        const hold = busy();
        for (const row of fresh) {
            const old = known.get(id(row));
            known.delete(id(row));
            (old || row).dataset.at = when;
            if (old) {
                const before = state(old);
                refresh(old, row);
                if (before !== state(old)) { news.push(`${name(old)}: ${state(old)}`); }
            }
            if (!hold) { body().append(old || row); }
        }
        for (const row of known.values()) {
            if (data.unknown.includes(alias(row))) {
                grown(row);
                continue;
            }
            if (!row.classList.contains('redlock-gone')) { news.push(`${name(row)}: ${say.dataset.gone}`); }
            if (hold) { row.classList.add('redlock-gone'); } else { row.remove(); }
        }
        if (!hold) { recount(); }
    }

    // The admin's script knows the tickboxes that were there when it began; run once more, with a list that the browser
    // keeps up to date, it knows those of all later rows. It counts them anew when a page is shown.
    function recount() {
        const counter = document.querySelector('.action-counter'), number = String(rows(body()).length);
        if (!counter || !window.Actions) { return; }
        if (!tickboxes) {
            tickboxes = document.getElementsByName('_selected_action');
            window.Actions(tickboxes);
        }
        if (counter.dataset.actionsIcnt === number) { return; } // a screen reader would read it out again
        counter.dataset.actionsIcnt = number;
        window.dispatchEvent(new Event('pageshow'));
        document.getElementById('action-toggle').checked = false; // it would be ticked above an empty list
    }

    function count(counted) {
        const walk = document.createTreeWalker(document.querySelector('.paginator') || say, NodeFilter.SHOW_TEXT);
        while (walk.nextNode()) {
            const text = walk.currentNode;
            if (text.data.trim() === live.dataset.counted) { text.data = ` ${counted} `; }
        }
        live.dataset.counted = counted;
    }

    const unknown = (aliases) => (
        aliases.length ? status.dataset.unknown.replace('{aliases}', () => aliases.join(', ')) : ''
    );

    async function list(reply, asked) {
        const data = await reply.json();
        const nodes = live.querySelector('.redlock-nodes'), before = spoken(nodes);
        renew(nodes, new DOMParser().parseFromString(data.nodes, 'text/html').body);
        nodes.classList.remove('redlock-old');
        const news = changes(before, spoken(nodes));
        merge(data, asked, at(nodes), news);
        announce(news);
        count(data.counted);
        status.textContent = unknown(data.unknown);
    }

    async function detail(reply) {
        const page = new DOMParser().parseFromString(await reply.text(), 'text/html');
        const fresh = page.querySelector('[data-refresh]');
        if (!fresh) { return; }
        if ('blind' in fresh.dataset && !('blind' in part.dataset)) { // what was known of the lock stays, and looks old
            aged();
            status.textContent = unknown([fresh.dataset.blind]);
            return;
        }
        if (selected(part) && !found(part, fresh.textContent)) { return aged(); }
        const before = spoken(part);
        renew(part, fresh);
        announce(changes(before, spoken(part)));
        part.toggleAttribute('data-blind', 'blind' in fresh.dataset);
        part.classList.remove('redlock-old');
        status.textContent = '';
        updated = at(part);
    }

    async function update() {
        const asked = performance.now();
        try {
            const url = live ? live.dataset.url + window.location.search : window.location.href;
            const reply = await fetch(url, {
                headers: {Accept: live ? 'application/json' : 'text/html', 'X-Redlock-Poll': '1'},
                signal: AbortSignal.timeout(2000 * (live || part).dataset.every), // without it, a lost network is silent
            });
            if (reply.redirected || reply.status === 403) {
                status.textContent = status.dataset.out;
            } else if (!reply.ok) {
                throw new Error(reply.status);
            } else {
                await (live ? list : detail)(reply, asked);
                tick();
                return;
            }
        } catch {
            status.textContent = status.dataset.failed;
        }
        if (!live) { return aged(); }
        live.querySelector('.redlock-nodes').classList.add('redlock-old');
        rows(body()).forEach(grown);
    }

    async function ask() {
        if (paused || asking || document.hidden) { return; }
        asking = true;
        await update();
        asking = false;
    }

    // Browsers offer the clipboard over HTTPS and on localhost only.
    if (navigator.clipboard) {
        document.documentElement.classList.add('redlock-copies');
        document.addEventListener('click', async (event) => {
            const button = event.target.closest('.redlock-copy');
            if (!button) { return; }
            await navigator.clipboard.writeText(button.dataset.name);
            say.textContent = say.dataset.copied;
            button.classList.add('redlock-copied');
            setTimeout(() => button.classList.remove('redlock-copied'), 2000);
        });
    }

    if (live || part) {
        pause.hidden = false;
        pause.addEventListener('click', () => {
            paused = !paused;
            pause.textContent = paused ? pause.dataset.resume : pause.dataset.pause;
            status.textContent = paused ? status.dataset.paused : '';
            ask();
        });
        setInterval(ask, (live || part).dataset.every * 1000);
        setInterval(() => { if (!paused && !document.hidden && !still.matches) { tick(); } }, 1000);
        tick();
        // On a small screen the filters are folded; the tiles are filters as well.
        const narrow = window.matchMedia('(max-width: 1100px)');
        const fold = () => document.querySelectorAll('#changelist-filter details').forEach((each) => {
            each.open = !narrow.matches;
        });
        if (narrow.matches) { fold(); }
        narrow.addEventListener('change', fold);
    }
}
