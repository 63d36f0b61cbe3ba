// Observation of sandboxes from outside: metrics, logs, lifecycle events, webhooks and
// teams.
import assert from 'node:assert/strict'
import { createHash, createHmac } from 'node:crypto'
import http from 'node:http'
import { after, before, describe, test } from 'node:test'
import { Sandbox } from 'e2b'
import { eventually, start } from './server.mjs'

let server, box
before(async () => {
  server = await start('--webhook-private')
  box = await Sandbox.create({ timeoutMs: 600_000, metadata: { seen: 'yes' } })
})
after(async () => {
  await box?.kill()
  await server?.stop()
})

describe('metrics', () => {
  test('are available for a sandbox, for a time range, and for several sandboxes', async () => {
    const began = new Date()
    const [m] = await eventually('the first sample', async () => {
      const all = await box.getMetrics()
      return all.length && all
    })
    for (const k of ['cpuCount', 'cpuUsedPct', 'memUsed', 'memTotal', 'diskUsed', 'diskTotal']) assert.equal(typeof m[k], 'number', k)
    assert.ok(m.memTotal >= m.memUsed && m.memUsed > 0 && m.diskTotal >= m.diskUsed)
    assert.ok(Math.abs(m.timestamp - began) < 300_000)
    assert.deepEqual(await box.getMetrics({ start: new Date(began - 3600_000), end: new Date(began - 1800_000) }), [])
    const many = await server.api('GET', `/sandboxes/metrics?sandbox_ids=${box.sandboxId},inosuch`)
    assert.equal(many.status, 200, many.text)
    assert.deepEqual(Object.keys(many.json.sandboxes), [box.sandboxId])
    assert.equal((await server.api('GET', '/sandboxes/inosuch/metrics')).status, 404)
  })

  test('show the used memory, CPU and disk', async () => {
    await box.commands.run('head -c 50000000 /dev/zero >filled')
    const handle = await box.commands.run(`python3 -c "x = bytearray(200 << 20)\nwhile True: pass"`, { background: true, timeoutMs: 0 })
    handle.wait().catch(() => {})
    await eventually('the use', async () => {
      const m = (await box.getMetrics()).at(-1)
      return m.memUsed > 200 << 20 && m.cpuUsedPct > 10 && m.diskUsed > 40_000_000
    }, 180)
    await handle.kill()
  })
})

describe('lifecycle events', () => {
  test('are the history of a sandbox, newest or oldest first, page by page', async () => {
    const other = await Sandbox.create({ timeoutMs: 60_000 })
    await other.setTimeout(90_000)
    await other.pause()
    await other.connect()
    await other.kill()
    const r = await server.api('GET', `/events/sandboxes/${other.sandboxId}?orderAsc=true&limit=100`)
    assert.equal(r.status, 200, r.text)
    const types = r.json.map((e) => e.type.replace('sandbox.lifecycle.', ''))
    assert.equal(types[0], 'created')
    assert.equal(types.at(-1), 'killed')
    for (const t of ['updated', 'paused', 'resumed']) assert.ok(types.includes(t), `${t} of ${types}`)
    for (const e of r.json) {
      assert.equal(e.sandboxId, other.sandboxId)
      for (const k of ['version', 'id', 'type', 'timestamp', 'sandboxTeamId', 'sandboxTemplateId']) assert.equal(typeof e[k], 'string', k)
    }
    const page = await server.api('GET', `/events/sandboxes/${other.sandboxId}?limit=2&offset=1`)
    assert.deepEqual(page.json.map((e) => e.id), [...r.json].reverse().slice(1, 3).map((e) => e.id))
    const all = await server.api('GET', '/events/sandboxes?limit=100')
    assert.ok(all.json.some((e) => e.sandboxId === box.sandboxId))
    assert.equal((await server.api('GET', '/events/sandboxes?limit=101')).status, 400)
  })
})

describe('webhooks', () => {
  test('are signed, retried, logged, redelivered on request, disabled and deleted', async () => {
    const got = []
    let answer = 500
    const receiver = http.createServer((req, res) => {
      const parts = []
      req.on('data', (b) => parts.push(b))
      req.on('end', () => {
        got.push({ headers: req.headers, body: Buffer.concat(parts).toString() })
        res.writeHead(answer).end()
        answer = 200
      })
    })
    await new Promise((done) => receiver.listen(0, '127.0.0.1', done))
    try {
      const url = `http://127.0.0.1:${receiver.address().port}/hook`
      const secret = 'a secret of more than thirty-two characters'
      const made = await server.api('POST', '/events/webhooks', { name: 'mine', url, enabled: true, events: ['sandbox.lifecycle.created'], signatureSecret: secret })
      assert.equal(made.status, 201, made.text)
      const hook = made.json
      const other = await Sandbox.create({ timeoutMs: 60_000 })
      await eventually('two attempts', () => got.length >= 2)
      for (const { headers, body } of got) {
        const event = JSON.parse(body)
        assert.deepEqual([event.type, event.sandboxId], ['sandbox.lifecycle.created', other.sandboxId])
        const e2bSum = createHash('sha256').update(secret + body).digest('base64').replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '')
        assert.equal(headers['e2b-signature'], e2bSum)
        assert.equal(headers['e2b-signature-version'], 'v1')
        assert.equal(headers['e2b-webhook-id'], hook.id)
        assert.ok(headers['e2b-delivery-id'])
        const standard = createHmac('sha256', secret).update(`${headers['webhook-id']}.${headers['webhook-timestamp']}.${body}`).digest('base64')
        assert.ok(headers['webhook-signature'].split(' ').includes(`v1,${standard}`))
      }
      assert.equal(got[0].headers['webhook-id'], got[1].headers['webhook-id'], 'a second attempt is the same message')
      const log = await eventually('the log', async () => {
        const r = await server.api('GET', `/events/webhooks/${hook.id}/deliveries`)
        const list = Array.isArray(r.json) ? r.json : r.json.deliveries
        return list?.[0]?.attempts >= 2 && list
      })
      const before = got.length
      const again = await server.api('POST', `/events/webhooks/${hook.id}/deliveries/${log[0].id}/redeliver`)
      assert.ok(again.status < 300, again.text)
      await eventually('the redelivery', () => got.length > before)
      assert.ok((await server.api('GET', '/events/webhooks')).json.some((h) => h.id === hook.id))
      const off = await server.api('PATCH', `/events/webhooks/${hook.id}`, { enabled: false })
      assert.deepEqual([off.status, off.json.enabled], [200, false])
      const shown = await server.api('GET', `/events/webhooks/${hook.id}`)
      assert.equal(shown.text.includes(secret), false, 'the secret is shown')
      assert.ok((await server.api('DELETE', `/events/webhooks/${hook.id}`)).status < 300)
      assert.equal((await server.api('GET', `/events/webhooks/${hook.id}`)).status, 404)
      await other.kill()
    } finally {
      receiver.close()
    }
  })
})

describe('logs', () => {
  test('are lines that the CLI can read', async () => {
    const r = await eventually('a line', async () => {
      const r = await server.api('GET', `/sandboxes/${box.sandboxId}/logs?limit=100`)
      return r.status !== 200 || r.json.logs.length ? r : false
    })
    assert.equal(r.status, 200, r.text)
    for (const { timestamp, line } of r.json.logs) {
      assert.ok(!Number.isNaN(Date.parse(timestamp)))
      const l = JSON.parse(line)
      assert.ok(l.level && l.logger, line)
    }
    assert.ok(Array.isArray(r.json.logEntries))
    const v2 = await server.api('GET', `/v2/sandboxes/${box.sandboxId}/logs?limit=10`)
    assert.equal(v2.status, 200, v2.text)
    assert.equal((await server.api('GET', '/sandboxes/inosuch/logs')).status, 404)
  })
})

describe('teams', () => {
  test('show the project and its usage', async () => {
    const [team] = (await server.api('GET', '/teams')).json
    assert.deepEqual([typeof team.teamID, team.isDefault], ['string', true])
    const numbers = await eventually('a sample', async () => {
      const r = await server.api('GET', `/teams/${team.teamID}/metrics`)
      return r.json?.length ? r.json : r.status !== 200 ? assert.fail(r.text) : false
    })
    assert.ok(numbers.at(-1).concurrentSandboxes >= 1)
    const most = await server.api('GET', `/teams/${team.teamID}/metrics/max?metric=concurrent_sandboxes`)
    assert.ok(most.json.value >= 1)
  })
})
