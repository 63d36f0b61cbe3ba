// The control plane as the official SDK uses it: create, list, timeouts,
// connect, and the errors as the SDK maps them.
import assert from 'node:assert/strict'
import http from 'node:http'
import { after, before, describe, test } from 'node:test'
import { networkInterfaces } from 'node:os'
import * as e2b from 'e2b'
import { eventually, start } from './server.mjs'

const { Sandbox } = e2b
let server, web
const address = Object.values(networkInterfaces()).flat().find((i) => i.family === 'IPv4' && !i.internal)?.address
const made = []
const create = async (...args) => {
  const box = await Sandbox.create(...args)
  made.push(box)
  return box
}

before(async () => {
  web = http.createServer((_, res) => res.end('from outside'))
  await new Promise((done) => web.listen(0, address, done))
  server = await start('--max-sandboxes', '12', '--egress', 'allow', '--egress-allow', address)
})
after(async () => {
  await Promise.all(made.map((b) => b.kill()))
  await server?.stop()
  web?.close()
})

describe('create', () => {
  test('without options: base template, five minutes, running at once', async () => {
    const box = await create()
    assert.match(box.sandboxId, /^[a-z0-9]+$/)
    const info = await box.getInfo()
    assert.equal(info.state, 'running')
    assert.ok(Math.abs(info.endAt - info.startedAt - 300_000) < 5000, `lives ${info.endAt - info.startedAt} ms`)
    assert.deepEqual([info.sandboxId, info.metadata], [box.sandboxId, {}])
    assert.ok(info.cpuCount > 0 && info.memoryMB > 0)
    assert.equal((await box.commands.run('echo alive')).stdout, 'alive\n')
    assert.equal(await box.isRunning(), true)
  })

  test('with timeout, metadata, environment and network', async () => {
    const metadata = { 'a b': 'c&d=e', ünïcode: '€ 100 %', empty: '' }
    const box = await create({ timeoutMs: 120_000, metadata, envs: { A: '1', B: "two 'quoted'\nlines" }, allowInternetAccess: false, network: { allowOut: ['192.0.2.7'], denyOut: ['0.0.0.0/0'] } })
    const info = await box.getInfo()
    assert.deepEqual(info.metadata, metadata)
    assert.ok(Math.abs(info.endAt - info.startedAt - 120_000) < 5000)
    assert.equal((await box.commands.run('echo "$A$B"')).stdout, "1two 'quoted'\nlines\n")
  })

  test('by the old path: secure or not, with the old default timeout', async () => {
    const r = await server.api('POST', '/sandboxes', { templateID: 'base' })
    assert.equal(r.status, 201, r.text)
    const info = (await server.api('GET', `/sandboxes/${r.json.sandboxID}`)).json
    assert.ok(Math.abs(Date.parse(info.endAt) - Date.parse(info.startedAt) - 15_000) < 2000)
    for (const k of ['sandboxID', 'templateID', 'clientID', 'envdVersion']) assert.equal(typeof r.json[k], 'string', k)
    assert.equal((await server.api('DELETE', `/sandboxes/${r.json.sandboxID}`)).status, 204)
  })

  test('refuses unsupported options and names them', async () => {
    for (const [body, want] of [
      [{ templateID: 'base', timeout: -1 }, /timeout/i],
      [{ templateID: 'base', timeout: 10_000_000 }, /timeout/i],
      [{ templateID: 'base', surprise: true }, /surprise/],
      [{ templateID: 'base', metadata: 'x' }, /metadata/],
      [{ templateID: 'base', envVars: { 'A=B': '1' } }, /envVars.*A=B/],
      [{ templateID: 'base', envVars: { '': '1' } }, /envVars/],
      [{ templateID: 'base', envVars: { A: 'x\0y' } }, /envVars.*A/],
      [{ templateID: 'base', network: { denyOut: ['example.com'] } }, /denyOut/i],
      [{ templateID: 'base', network: { allowOut: ['example.com'] } }, /allowOut|denyOut/i],
    ]) {
      const r = await server.api('POST', '/v2/sandboxes', body)
      assert.deepEqual([r.status, r.json?.code], [400, 400], `${JSON.stringify(body)}: ${r.text}`)
      assert.match(r.json.message, want)
    }
    await assert.rejects(Sandbox.create('no-such-template'), (e) => e instanceof Error && /no-such-template/.test(e.message))
    for (const body of ['{', '[]', '"x"', 'x'.repeat(2 << 20)]) {
      const r = await server.api('POST', '/v2/sandboxes', body)
      assert.ok([400, 413].includes(r.status), `${body.slice(0, 10)}: ${r.status}`)
    }
  })
})

describe('list', () => {
  test('finds by metadata, however it is encoded, by state and template', async () => {
    const box = await create({ metadata: { find: 'me & you = 100 %', also: 'ž' } })
    await create({ metadata: { find: 'other' } })
    const ids = async (query) => (await Sandbox.list({ query }).nextItems()).map((s) => s.sandboxId)
    assert.deepEqual(await ids({ metadata: { find: 'me & you = 100 %' } }), [box.sandboxId])
    assert.deepEqual(await ids({ metadata: { find: 'me & you = 100 %', also: 'ž' } }), [box.sandboxId])
    assert.deepEqual(await ids({ metadata: { find: 'me & you = 100 %', also: 'x' } }), [])
    assert.deepEqual(await ids({ metadata: { find: 'me & you = 100 %' }, state: ['running'] }), [box.sandboxId])
    assert.deepEqual(await ids({ metadata: { find: 'me & you = 100 %' }, state: ['paused'] }), [])
    const all = (await server.api('GET', '/v2/sandboxes?template=base')).json
    assert.ok(all.some((s) => s.sandboxID === box.sandboxId))
    assert.deepEqual((await server.api('GET', '/v2/sandboxes?template=no-such')).json, [])
    // The total is of all pages, within what was asked for, and of what runs.
    const total = async (query) => (await server.api('GET', `/v2/sandboxes?${query}`)).headers.get('x-total-running')
    assert.equal(await total('metadata=find%3Dother&limit=1'), '1')
    assert.equal(await total('state=paused'), null)
    // The old path has what runs, without pages.
    const v1 = async () => (await server.api('GET', '/sandboxes?metadata=also%3D%25C5%25BE')).json.map((s) => s.sandboxID)
    assert.deepEqual(await v1(), [box.sandboxId])
    await box.pause()
    assert.deepEqual(await v1(), [])
    assert.deepEqual(await ids({ metadata: { find: 'me & you = 100 %' }, state: ['paused'] }), [box.sandboxId])
  })

  test('pages through all sandboxes, newest or oldest first, each once', async () => {
    const ids = []
    for (let i = 0; i < 5; i++) ids.push((await create({ metadata: { paged: 'yes' } })).sandboxId)
    for (const [order, want] of [['desc', [...ids].reverse()], ['asc', ids]]) {
      const got = []
      let token = ''
      let pages = 0
      do {
        const r = await server.api('GET', `/v2/sandboxes?metadata=paged%3Dyes&limit=2&order=${order}${token && `&nextToken=${encodeURIComponent(token)}`}`)
        assert.equal(r.status, 200, r.text)
        got.push(...r.json.map((s) => s.sandboxID))
        token = r.headers.get('x-next-token') ?? ''
        assert.ok(++pages < 10)
      } while (token)
      assert.deepEqual(got, want, order)
    }
    const pages = Sandbox.list({ query: { metadata: { paged: 'yes' } }, limit: 3 })
    assert.equal((await pages.nextItems()).length, 3)
    assert.equal(pages.hasNext, true)
    assert.equal((await pages.nextItems()).length, 2)
    assert.equal(pages.hasNext, false)
    await Promise.all(ids.map((id) => Sandbox.kill(id)))
  })

  test('refuses invalid limits, orders, states and cursors', async () => {
    for (const q of ['limit=0', 'limit=101', 'limit=x', 'order=up', 'state=flying', 'nextToken=%21%21', 'nextToken=zz'])
      assert.equal((await server.api('GET', `/v2/sandboxes?${q}`)).status, 400, q)
  })
})

describe('life', () => {
  test('ends at the timeout, which can be extended and shortened', async () => {
    const box = await create({ timeoutMs: 60_000 })
    await box.setTimeout(300_000)
    assert.ok((await box.getInfo()).endAt - Date.now() > 200_000)
    await Sandbox.setTimeout(box.sandboxId, 1500)
    await eventually('the end', async () => !(await box.isRunning()))
    await eventually('its end on the record', () => box.getInfo().then(() => false, (e) => e instanceof e2b.SandboxNotFoundError))
    await assert.rejects(box.setTimeout(1000), e2b.SandboxNotFoundError)
    assert.equal(await box.kill(), false)
  })

  test('connect extends a running sandbox, never shortens it, and keeps its credentials', async () => {
    const box = await create({ timeoutMs: 200_000, envs: { WHO: 'me' } })
    await box.files.write('state', 'kept')
    const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 1000 })
    assert.equal(again.sandboxId, box.sandboxId)
    assert.ok((await again.getInfo()).endAt - Date.now() > 150_000, 'connect shortened it')
    await Sandbox.connect(box.sandboxId, { timeoutMs: 600_000 })
    assert.ok((await again.getInfo()).endAt - Date.now() > 500_000, 'connect did not extend it')
    assert.equal(await again.files.read('state'), 'kept')
    assert.equal((await again.commands.run('echo $WHO')).stdout, 'me\n')
    assert.equal((await box.commands.run('echo still')).stdout, 'still\n')
  })

  test('is extended by refreshes and by the older resume', async () => {
    const box = await create({ timeoutMs: 30_000 })
    assert.equal((await server.api('POST', `/sandboxes/${box.sandboxId}/refreshes`, { duration: 120 })).status, 204)
    assert.ok((await box.getInfo()).endAt - Date.now() > 60_000)
    await box.pause()
    assert.equal((await server.api('POST', `/sandboxes/${box.sandboxId}/resume`, { timeout: 60 })).status, 201)
    assert.equal((await box.commands.run('echo resumed')).stdout, 'resumed\n')
    await box.kill()
  })

  test('ends by kill, once', async () => {
    const box = await create()
    assert.equal(await Sandbox.kill(box.sandboxId), true)
    assert.equal(await Sandbox.kill(box.sandboxId), false)
    assert.equal(await box.isRunning(), false)
    await assert.rejects(Sandbox.connect(box.sandboxId), e2b.SandboxNotFoundError)
  })
})

describe('network', () => {
  const reach = async (box) => (await box.commands.run(`curl -s -m 50 http://${address}:${web.address().port}; true`)).stdout
  test('follows the rules of create, and can be changed at run time', async () => {
    const box = await create()
    assert.equal(await reach(box), 'from outside')
    await box.updateNetwork({ denyOut: [address] })
    assert.equal(await reach(box), '')
    assert.deepEqual((await box.getInfo()).network.denyOut, [address])
    await box.updateNetwork({ denyOut: ({ allTraffic }) => [allTraffic], allowOut: [address] })
    assert.equal(await reach(box), 'from outside')
    await box.updateNetwork({ allowInternetAccess: false })
    assert.equal(await reach(box), '')
    await box.updateNetwork({})
    assert.equal(await reach(box), 'from outside')
    const closed = await create({ allowInternetAccess: false })
    assert.equal(await reach(closed), '')
    await Promise.all([box.kill(), closed.kill()])
    await assert.rejects(box.updateNetwork({}), e2b.SandboxNotFoundError)
  })

  test('refuses malformed rules', async () => {
    const box = await create()
    for (const body of [{ denyOut: ['example.com'] }, { allowOut: ['not an address'] }, { surprise: 1 }])
      assert.equal((await server.api('PUT', `/sandboxes/${box.sandboxId}/network`, body)).status, 400, JSON.stringify(body))
    await box.kill()
  })
})

describe('errors', () => {
  test('of a wrong or a missing key are AuthenticationError, everywhere', async () => {
    const wrong = { apiKey: 'e2b_' + '0'.repeat(40) }
    await assert.rejects(Sandbox.create(wrong), e2b.AuthenticationError)
    await assert.rejects(Sandbox.list(wrong).nextItems(), e2b.AuthenticationError)
    await assert.rejects(Sandbox.kill('isomething', wrong), e2b.AuthenticationError)
    for (const headers of [{ 'X-API-KEY': '' }, { 'X-API-KEY': 'e2b_x' }]) assert.equal((await server.api('GET', '/v2/sandboxes', undefined, headers)).status, 401)
  })

  test('have the code in the body, as the SDK reads it', async () => {
    for (const [method, path] of [['GET', '/sandboxes/inosuch'], ['DELETE', '/sandboxes/inosuch'], ['POST', '/sandboxes/inosuch/timeout'], ['POST', '/v2/sandboxes/inosuch/connect'], ['POST', '/sandboxes/inosuch/connect']]) {
      const r = await server.api(method, path, method === 'POST' ? { timeout: 10 } : undefined)
      assert.deepEqual([r.status, r.json?.code, typeof r.json?.message], [404, 404, 'string'], `${method} ${path}: ${r.text}`)
    }
  })

  test('at the limit of sandboxes: 429 with Retry-After, RateLimitError', async () => {
    await Promise.all(made.map((b) => b.kill())) // one may reach its timeout meanwhile
    const full = []
    let refused
    for (let i = 0; i < 13 && !refused; i++) {
      const r = await server.api('POST', '/v2/sandboxes', { templateID: 'base', timeout: 600 })
      if (r.status === 201) full.push(r.json.sandboxID)
      else refused = r
    }
    assert.deepEqual([refused.status, refused.json.code], [429, 429])
    await assert.rejects(Sandbox.create({ retries: 0 }), e2b.RateLimitError)
    await Promise.all(full.map((id) => Sandbox.kill(id)))
  })

  test('/health answers without a key', async () => {
    assert.equal((await fetch(server.url + '/health')).status, 200)
  })
})
