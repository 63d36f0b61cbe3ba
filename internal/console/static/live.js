// Refreshes stale pages. Server-sent events report changes; the script updates
// the number of waiting actions in the title and replaces the element #live.
// It never discards a person's input, selection or focus: then it only shows a
// notice. It never turns text into markup. Pages with a decision form have no
// #live, so their content changes only when a person reloads them.
'use strict'
;(() => {
  const root = document.documentElement
  const watch = root.dataset.watch || ''
  const bare = document.title.replace(/^\(\d+\+?\) /, '')
  let mark = root.dataset.mark || ''
  let busy = false
  let again = false

  const region = () => document.getElementById('live')
  const bar = document.getElementById('changed')

  function count(n) {
    const text = n > 1000 ? '1000+' : String(n)
    document.title = n > 0 ? `(${text}) ${bare}` : bare
    const badge = document.getElementById('waiting')
    if (badge) {
      badge.textContent = n > 0 ? text : ''
      badge.hidden = n === 0
    }
  }

  // inUse reports whether replacing el would lose input, focus or selection.
  function inUse(el) {
    const changed = (f) => {
      if (f.type === 'hidden') return false
      if (f.type === 'checkbox' || f.type === 'radio') return f.checked !== f.defaultChecked
      if (f.tagName !== 'SELECT') return f.value !== f.defaultValue
      return f.selectedIndex !== Math.max(0, [...f.options].findIndex((o) => o.defaultSelected))
    }
    if ([...el.querySelectorAll('input, textarea, select')].some(changed)) return true
    const focused = document.activeElement
    if (focused && focused !== el && el.contains(focused)) return true
    const s = document.getSelection()
    return Boolean(s && !s.isCollapsed && el.contains(s.anchorNode))
  }

  // say shows the notice. Content that is replaced under the pointer could be
  // approved by a click that was meant for the previous content.
  function say() {
    if (bar) bar.hidden = false
    const link = document.getElementById('look')
    if (link) link.href = location.pathname + location.search
  }

  // renew fetches the page and replaces #live. Quiet ones leave it as it is if somebody
  // uses it, without a word: they come again.
  async function renew(quiet) {
    const old = region()
    if (quiet === true && (busy || !old || document.hidden || inUse(old))) return
    if (busy) {
      again = true
      return
    }
    if (!old || inUse(old)) return say()
    busy = true
    try {
      const answer = await fetch(location.href, { headers: { Accept: 'text/html' }, cache: 'no-store', redirect: 'error' })
      if (!answer.ok) throw new Error(String(answer.status))
      const page = new DOMParser().parseFromString(await answer.text(), 'text/html')
      const fresh = page.getElementById('live')
      if (quiet === true && (!fresh || inUse(old))) return
      if (!fresh || inUse(old)) return say() // something was typed meanwhile
      const open = new Set([...old.querySelectorAll('details[open][id]')].map((d) => d.id))
      old.replaceWith(document.importNode(fresh, true))
      for (const d of region().querySelectorAll('details[id]')) if (open.has(d.id)) d.open = true
      mark = page.documentElement.dataset.mark || mark
      if (bar) bar.hidden = true
    } catch {
      if (quiet !== true) say()
    } finally {
      busy = false
      if (again) {
        again = false
        renew()
      }
    }
  }

  let source
  function listen() {
    source = new EventSource(`/console/events${watch ? `?watch=${encodeURIComponent(watch)}` : ''}`)
    source.onmessage = (e) => {
      const now = JSON.parse(e.data)
      count(now.waiting)
      if (watch && now.mark && now.mark !== mark) {
        mark = now.mark
        renew()
      }
    }
    source.onerror = () => {
      // A closed stream (for example, too many open pages) is retried rarely.
      if (source.readyState === EventSource.CLOSED) setTimeout(listen, 60_000)
    }
  }
  listen()
  const tick = Number(root.dataset.tick || 0)
  if (tick > 0) setInterval(() => renew(true), tick * 1000)
  addEventListener('pagehide', () => source.close())
  addEventListener('pageshow', (e) => {
    if (e.persisted) listen()
  })
})()
