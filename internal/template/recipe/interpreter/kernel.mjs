// One JavaScript or TypeScript context of the code interpreter, in Node.
//
// It speaks to server.py as kernel.py does: commands on descriptor 3, events on
// 4, both JSON lines; what the code prints goes straight into the pipes 1 and 2.
//
// The main thread runs the cells by V8's own inspector in its REPL mode: that
// knows top-level await and lets a cell declare again what an earlier one did.
// A worker reads the commands, so that there is somebody to hear an interrupt
// while a cell loops; it ends the cell by an inspector session of its own.
//
// Nothing here defends anything: the code that it runs can change it.

import fs from 'node:fs'
import inspector from 'node:inspector'
import module from 'node:module'
import net from 'node:net'
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import util from 'node:util'
import vm from 'node:vm'
import { Worker, isMainThread, parentPort } from 'node:worker_threads'

const CMD = 3
const EVENTS = 4
const MAX_TEXT = 1 << 20 // characters of a value's text
const { parse, stringify } = JSON
const inspect = util.inspect
const isNativeError = util.types.isNativeError
const internal = module.createRequire(import.meta.url) // also Node's own parsers, see server.py

if (isMainThread) main()
else control()

// --- the worker ------------------------------------------------------------------

function control() {
  const session = new inspector.Session()
  session.connectToMainThread()
  parentPort.once('message', (exiting) => {
    session.disconnect() // or node says that it waits for a debugger
    Atomics.store(exiting, 0, 1)
    Atomics.notify(exiting, 0)
  })
  let have = ''
  const commands = new net.Socket({ fd: CMD, readable: true, writable: false })
  commands.setEncoding('utf8')
  commands.on('data', (text) => {
    have += text
    for (let end; (end = have.indexOf('\n')) >= 0; have = have.slice(end + 1)) {
      const command = parse(have.slice(0, end))
      if (command.op !== 'interrupt') parentPort.postMessage(command)
      // The message tells the main thread that it is free again, also of a cell
      // that only waits and so has nothing to end.
      else session.post('Runtime.terminateExecution', () => parentPort.postMessage(command))
    }
  })
  commands.on('close', () => process.kill(process.pid, 'SIGKILL')) // the server has gone
}

// --- the main thread ---------------------------------------------------------------

function send(event) {
  const b = Buffer.from(stringify(event) + '\n')
  for (let n = 0; n < b.length; ) n += fs.writeSync(EVENTS, b, n)
}

function main() {
  const language = process.argv[3]
  try {
    process.chdir(process.argv[2])
  } catch {
    process.chdir('/')
  }
  process.argv.splice(1)
  process.execArgv.splice(0) // of processes that the code starts
  const session = new inspector.Session()
  session.connect()
  process.on('exit', () => {
    session.disconnect()
    const exiting = new Int32Array(new SharedArrayBuffer(4))
    worker.postMessage(exiting)
    Atomics.wait(exiting, 0, 0, 100)
  })
  const post = (method, params) => {
    return new Promise((done) => session.post(method, params, (err, v) => done(err ? { terminated: true } : v)))
  }
  // Values leave the inspector through this box.
  const box = {}
  let boxed
  let count = 0
  let cell = null // {ended, interrupt} of the cell that runs
  let base = {}

  prepare(language)
  process.on('SIGINT', () => {}) // for the programs that a cell has started
  const late = (err) => process.stderr.write(`Uncaught ${isNativeError(err) ? stack(err) : inspect(err)}\n`)
  process.on('uncaughtException', late)
  process.on('unhandledRejection', late)

  const worker = new Worker(new URL(import.meta.url), { execArgv: [], argv: [] })
  worker.on('message', (m) => {
    if (m.op === 'run') run(m)
    else if (m.op === 'interrupt') cell?.interrupt()
    else if (m.op === 'reseed') {
      reseed(m.all)
      if (!m.silent) send({ t: 'done' })
    }
  })
  globalThis.__box = box
  session.post('Runtime.evaluate', { expression: '__box' }, (_, v) => (boxed = v.result.objectId))
  delete globalThis.__box
  worker.once('online', () => send({ t: 'ready' }))

  async function run({ code, base: wanted, call }) {
    send({ t: 'busy' })
    send({ t: 'count', n: ++count })
    for (const k of Object.keys(base)) if (!(k in wanted)) delete process.env[k]
    if (stringify(base) !== stringify(wanted)) Object.assign(process.env, (base = wanted))
    const saved = Object.keys(call).map((k) => [k, process.env[k]])
    Object.assign(process.env, call)
    let end
    const ended = new Promise((done) => (end = done))
    const mine = (cell = {
      interrupt() {
        if (cell !== mine) return
        cell = null
        end({ error: { name: 'KeyboardInterrupt', value: 'the execution was interrupted', traceback: '' } })
      },
    })
    work(code).then(end, (err) => end({ error: describe(err) }))
    const { data, error } = await ended
    cell = null
    for (const [k, v] of saved) {
      if (v === undefined) delete process.env[k]
      else process.env[k] = v
    }
    session.post('Runtime.releaseObjectGroup', { objectGroup: 'cell' })
    if (error) send({ t: 'error', ...error })
    else if (data) send({ t: 'result', main: true, data })
    send({ t: 'done' })
  }

  /** work runs a cell and returns its result as {data} or {error}. */
  async function work(code) {
    const name = `cell-${count}.${language === 'typescript' ? 'ts' : 'js'}`
    let text = translate(code, language)
    // V8 could await at the top level, too. But what it awaits may be forgotten by
    // everybody and collected, and from there it calls us: node dies of that.
    const awaits = text.includes('await') ? awaited(text) : null
    if (awaits) text = awaits
    const expression = `${text}\n//# sourceURL=${name}`
    const answer = await post('Runtime.evaluate', { expression, replMode: true, objectGroup: 'cell' })
    // Ended by the worker: it says so, too, and that is what the cell ends with.
    if (answer.terminated) return new Promise(() => {})
    const { result, exceptionDetails: failed } = answer
    if (!failed && result.type === 'undefined') return {}
    box.value = undefined
    const remote = failed?.exception ?? result
    const by = remote.objectId ? { objectId: remote.objectId } : 'unserializableValue' in remote ? { unserializableValue: remote.unserializableValue } : { value: remote.value }
    await post('Runtime.callFunctionOn', { functionDeclaration: 'function(v) { this.value = v }', objectId: boxed, arguments: [by], objectGroup: 'cell' })
    let value = box.value
    box.value = undefined
    if (failed) {
      const e = describe(value)
      // Of what cannot be parsed there is no stack.
      if (!e.traceback.includes(name) && failed.lineNumber !== undefined && value instanceof SyntaxError) e.traceback += `\n    at ${name}:${failed.lineNumber + 1}:${failed.columnNumber + 1}`
      return { error: e }
    }
    if (util.types.isPromise(value)) value = await value
    if (awaits) {
      value = value?.value
      if (util.types.isPromise(value)) value = await value
    }
    return value === undefined ? {} : { data: await bundle(value) }
  }
}

/** describe returns an error event's fields for something thrown. */
function describe(err) {
  try {
    if (isNativeError(err) || err instanceof Error) return { name: String(err.name), value: String(err.message), traceback: stack(err) }
    const text = inspect(err)
    return { name: 'Error', value: typeof err === 'string' ? err : text, traceback: `Uncaught ${text}` }
  } catch {
    return { name: 'Error', value: 'the error that was thrown cannot be shown', traceback: '' }
  }
}

/** stack returns the part of an error's stack that is the user's. */
function stack(err) {
  let text = String(err.stack ?? err)
  const ours = text.search(/\n {4}at (async )?(\S+ \()?(node:inspector|new Promise|file:\/\/\S*\/interpreter\/kernel\.mjs|Session\.post|Worker\.emit)/)
  if (ours > 0) text = text.slice(0, ours)
  text = text.replace(/\n {4}at .*\(?node:internal.*/g, '')
  if (err.cause !== undefined) text += `\n  [cause]: ${isNativeError(err.cause) ? stack(err.cause) : inspect(err.cause)}`
  return text
}

/** bundle returns a value in all formats that it has. */
async function bundle(value) {
  const display = value !== null && (typeof value === 'object' || typeof value === 'function') ? value[Symbol.for('Jupyter.display')] : undefined
  if (typeof display === 'function') {
    const formats = await display.call(value)
    if (formats !== null && typeof formats === 'object') return formatted(formats)
  }
  let text = inspect(value, { maxStringLength: MAX_TEXT, maxArrayLength: 1000 })
  if (text.length > MAX_TEXT) text = text.slice(0, MAX_TEXT) + '…'
  const data = { 'text/plain': text }
  // What is plain data is shown as data, too.
  const p = value !== null && typeof value === 'object' ? Object.getPrototypeOf(value) : undefined
  if (Array.isArray(value) || p === null || p === Object.prototype) {
    try {
      const json = stringify(value)
      if (json.length <= MAX_TEXT) data['application/json'] = parse(json)
    } catch {
      // Circular, or with a BigInt.
    }
  }
  return data
}

function formatted(formats) {
  return Object.fromEntries(Object.entries(formats).map(([k, v]) => [k, ArrayBuffer.isView(v) ? Buffer.from(v.buffer, v.byteOffset, v.byteLength).toString('base64') : v]))
}

/** show sends a result that is not a cell's last expression. */
function show(formats) {
  send({ t: 'result', main: false, data: formatted(formats) })
}

function prepare(language) {
  const hidden = (name, value) => Object.defineProperty(globalThis, name, { value, writable: true, configurable: true, enumerable: false })
  const here = () => path.join(process.cwd(), `cell.${language === 'typescript' ? 'ts' : 'js'}`)
  hidden('require', module.createRequire(here()))
  hidden('module', { exports: {} })
  hidden('exports', globalThis.module.exports)
  hidden('__dirname', process.cwd())
  hidden('__filename', here())
  hidden('display', (value) => {
    const b = bundle(value) // a promise only if the value shows itself
    return b.then(show)
  })
  const one = (mime) => (v) => show({ [mime]: v })
  hidden('$$', {
    mime: show,
    text: one('text/plain'), html: one('text/html'), markdown: one('text/markdown'), svg: one('image/svg+xml'), png: one('image/png'),
    jpeg: one('image/jpeg'), pdf: one('application/pdf'), latex: one('text/latex'), json: one('application/json'), javascript: one('application/javascript'),
  })
  // Modules that a cell imports are looked for from its working directory.
  const kernel = import.meta.url
  module.registerHooks({
    resolve(name, context, next) {
      return next(name, context.parentURL === kernel ? { ...context, parentURL: pathToFileURL(here()).href } : context)
    },
  })
  hidden('__import', async (name, options, names) => {
    const m = await import(name, options)
    for (const n of names ?? []) if (!(n in m)) throw new SyntaxError(`The requested module '${name}' does not provide an export named '${n}'`)
    return m
  })
  hidden('__meta', () => ({ url: pathToFileURL(here()).href, filename: here(), dirname: process.cwd(), resolve: (name) => pathToFileURL(globalThis.require.resolve(name)).href }))
}

let transform, acorn, topLevelAwait

/** awaited returns a script in which an async function does what awaits at the top level; null if nothing does. */
function awaited(code) {
  try {
    topLevelAwait ??= internal('internal/repl/await').processTopLevelAwait
    return topLevelAwait(code)
  } catch {
    return null
  }
}

/** translate returns a cell as a script that V8 takes: without types, with calls in the place of imports. */
function translate(code, language) {
  if (language === 'typescript') {
    if (!transform) {
      try {
        const amaro = internal('internal/deps/amaro/dist/index')
        transform = (text) => amaro.transformSync(text, { mode: 'transform', sourceMap: false, filename: 'cell.ts' }).code
      } catch {
        transform = module.stripTypeScriptTypes // no enums, no namespaces
      }
    }
    try {
      // It takes an expression of braces for a block, too.
      const wrapped = braced(code)
      code = wrapped === code ? transform(code) : transform(wrapped)
    } catch (err) {
      const e = new SyntaxError(err?.message ?? String(err))
      e.stack = `SyntaxError: ${e.message}` + (err?.startLine ? `\n    at cell:${err.startLine}:${err.startColumn + 1}` : '')
      throw e
    }
  } else code = braced(code)
  return /\b(import|export)\b/.test(code) ? imported(code) : code
}

/** braced makes "{a: 1}" an object and not a block, if it can be one. */
function braced(code) {
  if (!/^\s*\{/.test(code) || !/\}\s*$/.test(code)) return code
  try {
    new vm.Script(`(${code}\n)`)
    return `(${code}\n)`
  } catch {
    return code
  }
}

function imported(code) {
  let tree
  try {
    acorn ??= internal('internal/deps/acorn/acorn/dist/acorn')
    tree = acorn.parse(code, { ecmaVersion: 'latest', sourceType: 'module', allowAwaitOutsideFunction: true, allowReturnOutsideFunction: true, allowHashBang: true })
  } catch {
    return code // V8 says what is wrong with it
  }
  const changes = [] // [start, end, text]
  const nameOf = (n) => (n.type === 'Literal' ? n.value : n.name)
  for (const n of tree.body) {
    if (n.type === 'ImportDeclaration') {
      const with_ = n.attributes?.length ? `{ with: { ${n.attributes.map((a) => `${stringify(nameOf(a.key))}: ${stringify(a.value.value)}`).join(', ')} } }` : 'undefined'
      const names = [], fields = []
      let all
      for (const s of n.specifiers) {
        if (s.type === 'ImportNamespaceSpecifier') all = s.local.name
        else {
          const from = s.type === 'ImportDefaultSpecifier' ? 'default' : nameOf(s.imported)
          names.push(from)
          fields.push(`${stringify(from)}: ${s.local.name}`)
        }
      }
      const get = `await __import(${n.source.raw}, ${with_}, ${stringify(names)})`
      const left = [all, fields.length ? `{ ${fields.join(', ')} }` : undefined].filter(Boolean)
      changes.push([n.start, n.end, left.length ? left.map((l) => `const ${l} = ${get};`).join(' ') : `void (${get});`])
    } else if (n.type === 'ExportNamedDeclaration') changes.push(n.declaration ? [n.start, n.declaration.start, ''] : [n.start, n.end, n.source ? `void (await __import(${n.source.raw}));` : ''])
    else if (n.type === 'ExportDefaultDeclaration') changes.push([n.start, n.declaration.start, ''])
    else if (n.type === 'ExportAllDeclaration') changes.push([n.start, n.end, `void (await __import(${n.source.raw}));`])
  }
  const walk = (n) => {
    if (n === null || typeof n !== 'object') return
    if (n.type === 'ImportExpression') changes.push([n.start, n.start + 'import'.length, '__import'])
    else if (n.type === 'MetaProperty' && n.meta.name === 'import') changes.push([n.start, n.end, '__meta()'])
    for (const k in n) if (typeof n[k] === 'object') walk(n[k])
  }
  try {
    walk(tree)
  } catch {
    // Nested so deeply that it does not fit the stack: without imports, then.
  }
  for (const [start, end, text] of changes.sort((a, b) => b[0] - a[0])) code = code.slice(0, start) + text + code.slice(end)
  return code
}

/** reseed makes Math.random unlike that of every other copy of the sandbox. V8 cannot be told to. */
function reseed(everything) {
  if (!everything) return
  const fd = fs.openSync('/dev/urandom')
  const b = Buffer.alloc(16)
  fs.readSync(fd, b)
  fs.closeSync(fd)
  let [x, y, z, w] = new Uint32Array(b.buffer, b.byteOffset, 4)
  const next = () => { // sfc32
    const t = (x + y + w++) | 0
    x = y ^ (y >>> 9)
    y = (z + (z << 3)) | 0
    z = ((z << 21) | (z >>> 11)) + t | 0
    return t >>> 0
  }
  Math.random = function random() {
    return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992
  }
}
