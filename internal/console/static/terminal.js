// A terminal in a sandbox, drawn by xterm.js. What the sandbox writes is hostile: its
// escape codes may colour and move, and nothing else. See guards below.
'use strict'
;(() => {
  const place = document.getElementById('terminal')
  if (!place || !window.Terminal) return
  const state = document.getElementById('terminal-state')

  // The policy of the console's pages has no inline style. xterm.js writes <style> elements
  // and style attributes; the same rules through the CSSOM are allowed, so they go there.
  const make = document.createElement.bind(document)
  document.createElement = (name, ...more) => {
    if (name !== 'style') return make(name, ...more)
    const sheet = new CSSStyleSheet()
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet]
    const stand = make('span') // in its place
    stand.hidden = true
    Object.defineProperty(stand, 'textContent', { get: () => '', set: (text) => sheet.replaceSync(text) })
    return stand
  }
  const plain = Element.prototype.setAttribute
  HTMLElement.prototype.setAttribute = function (name, value) {
    if (name === 'style') this.style.cssText = value
    else plain.call(this, name, value)
  }

  const ink = getComputedStyle(place)
  const term = new Terminal({
    scrollback: 5000,
    cursorBlink: false,
    screenReaderMode: place.dataset.reader === 'true',
    fontFamily: ink.fontFamily,
    fontSize: 13,
    theme: { background: ink.backgroundColor, foreground: ink.color, cursor: ink.color },
    allowProposedApi: false,
    minimumContrastRatio: 4.5,
    // The attack: OSC 8 shows one address and leads to another. Nothing leads anywhere.
    linkHandler: { activate() {}, hover() {}, allowNonHttpProtocols: false },
    windowOptions: {},
  })
  // The attack: a program asks the terminal for its title, its settings, the clipboard or a
  // colour, and the answer is typed into the shell as if the person had typed it. Nothing
  // that a program writes makes the terminal type.
  const swallow = () => true
  for (const id of [0, 1, 2, 4, 5, 8, 10, 11, 12, 52, 104, 110, 111, 112]) term.parser.registerOscHandler(id, swallow)
  for (const intermediates of ['$', '+']) term.parser.registerDcsHandler({ intermediates, final: 'q' }, swallow)
  for (const prefix of ['', '>', '=', '?']) {
    for (const final of ['c', 'n', 't', 'u']) {
      if (prefix === '' && final === 'u') continue // puts the cursor back
      term.parser.registerCsiHandler(prefix ? { prefix, final } : { final }, swallow)
    }
    term.parser.registerCsiHandler(prefix ? { prefix, intermediates: '$', final: 'p' } : { intermediates: '$', final: 'p' }, swallow)
  }

  const fit = new FitAddon.FitAddon()
  term.loadAddon(fit)
  term.open(place)
  fit.fit()
  term.focus()

  const at = new URL(place.dataset.socket, location.href)
  at.protocol = location.protocol === 'https:' ? 'wss:' : 'ws:'
  at.searchParams.set('cols', term.cols)
  at.searchParams.set('rows', term.rows)
  const socket = new WebSocket(at)
  socket.binaryType = 'arraybuffer'
  const say = (text) => { if (state) state.textContent = text }
  const send = (m) => { if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(m)) }
  let ended = false

  socket.onopen = () => say('open')
  socket.onmessage = (e) => {
    if (typeof e.data === 'string') {
      ended = true
      say('ended: ' + JSON.parse(e.data).end)
      return
    }
    const b = new Uint8Array(e.data)
    term.write(b, () => send({ ack: b.length }))
  }
  socket.onclose = () => {
    if (!ended) say('ended: the connection was closed')
    term.options.disableStdin = true
  }
  term.onData((text) => {
    // A long paste goes in parts that the server takes.
    for (let i = 0; i < text.length; i += 8192) send({ in: text.slice(i, i + 8192) })
  })
  term.onResize(({ cols, rows }) => send({ size: [cols, rows] }))
  new ResizeObserver(() => fit.fit()).observe(place)
  // Tab belongs to the shell; Shift+Escape leaves the terminal for the page.
  term.attachCustomKeyEventHandler((e) => {
    if (e.type === 'keydown' && e.key === 'Escape' && e.shiftKey) {
      document.getElementById('terminal-leave')?.focus()
      return false
    }
    return true
  })
})()
