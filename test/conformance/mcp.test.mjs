// Servers of the Model Context Protocol in a sandbox, by the official SDK: its mcp option,
// getMcpUrl and getMcpToken.
import assert from 'node:assert/strict'
import { after, before, describe, it } from 'node:test'
import { Sandbox, Secret } from 'e2b'
import { start } from './server.mjs'

// A server that needs nothing from the network.
const program = `
import json, os, sys
for line in sys.stdin:
    m = json.loads(line)
    if "id" not in m: continue
    r = {}
    if m["method"] == "initialize": r = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "demo", "version": "1"}}
    if m["method"] == "tools/list": r = {"tools": [{"name": n, "description": n, "inputSchema": {"type": "object"}} for n in ["whoami", "add", "die"]]}
    if m["method"] == "tools/call":
        a, n = m["params"].get("arguments", {}), m["params"]["name"]
        if n == "die": sys.exit(1)
        text = json.dumps({"uid": os.getuid(), "env": dict(os.environ)}) if n == "whoami" else str(a["a"] + a["b"])
        r = {"content": [{"type": "text", "text": text}]}
    print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
`
const runCmd = `python3 -c '${program}'`

describe('mcp', () => {
  let server, sandbox, mcp
  before(async () => {
    server = await start('--pool-max', '0', '--pool-min', '0')
    await Secret.create('demo', 'VALUE-OF-THE-SECRET', { metadata: { 'postern.hosts': 'api.example.com' } })
    sandbox = await Sandbox.create({ envs: { CREATORS: 'own' }, mcp: { one: { runCmd, envs: { TOKEN: Secret.fill('demo') } }, 'two.x': { runCmd } } })
    mcp = async (method, params, headers = {}) => {
      const at = new URL(sandbox.getMcpUrl())
      assert.deepEqual([at.host.split('-')[0], at.pathname], ['50005', '/mcp'])
      const r = await fetch(server.url + at.pathname, {
        method: 'POST',
        headers: {
          'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': '50005', 'E2b-Traffic-Access-Token': sandbox.trafficAccessToken,
          Authorization: `Bearer ${await sandbox.getMcpToken()}`, 'Content-Type': 'application/json', Accept: 'application/json, text/event-stream', ...headers,
        },
        body: JSON.stringify({ jsonrpc: '2.0', id: 1, method, params }),
      })
      return r.ok ? { status: r.status, ...(await r.json()) } : { status: r.status }
    }
  })
  after(() => server.stop())

  it('serves the tools of all servers together', async () => {
    const { result } = await mcp('tools/list')
    assert.deepEqual(result.tools.map((t) => t.name), ['one__whoami', 'one__add', 'one__die', 'two.x__whoami', 'two.x__add', 'two.x__die'].map((n) => n.replace('two.x', 'two-x')))
    assert.equal((await mcp('tools/call', { name: 'two-x__add', arguments: { a: 2, b: 3 } })).result.content[0].text, '5')
    assert.equal((await mcp('tools/call', { name: 'three__add' })).result, undefined)
  })

  it('gives each server a user of its own, and no secret', async () => {
    const who = async (s) => JSON.parse((await mcp('tools/call', { name: `${s}__whoami`, arguments: {} })).result.content[0].text)
    const [one, two] = [await who('one'), await who('two-x')]
    assert.notEqual(one.uid, two.uid)
    assert.ok(one.uid >= 61000 && two.uid >= 61000)
    assert.match(one.env.TOKEN, /^pst_/)
    assert.ok(!JSON.stringify([one, two]).includes('VALUE-OF'))
    assert.ok(!('TOKEN' in two.env) && !('CREATORS' in one.env) && !('GATEWAY_ACCESS_TOKEN' in one.env))
  })

  it('needs the token, which only root reads', async () => {
    assert.equal((await mcp('tools/list', {}, { Authorization: 'Bearer wrong' })).status, 401)
    assert.equal((await mcp('tools/list', {}, { 'E2b-Traffic-Access-Token': 'wrong' })).status, 403)
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal(await again.getMcpToken(), await sandbox.getMcpToken())
    await assert.rejects(sandbox.files.read('/etc/mcp-gateway/.token'))
    assert.ok(!(await sandbox.commands.run('cat /proc/*/cmdline | tr "\\0" " "')).stdout.includes(await sandbox.getMcpToken()))
  })

  it('starts a server again that has died', async () => {
    assert.ok((await mcp('tools/call', { name: 'one__die', arguments: {} })).error)
    for (let i = 0; ; i++) {
      if ((await mcp('tools/call', { name: 'one__add', arguments: { a: 1, b: 1 } })).result?.content[0].text === '2') break
      assert.ok(i < 100, 'it does not come back')
      await new Promise((done) => setTimeout(done, 100))
    }
  })

  it('refuses what it cannot have', async () => {
    for (const [config, want] of [
      [{ exa: { apiKey: 'sk-in-the-clear' } }, /apiKey: is a credential/],
      [{ exa: { apiKey: '${e2b.secrets.none}' } }, /none/],
      [{ nothing: {} }, /is not in the catalogue/],
      [{ one: { runCmd: '' } }, /runCmd: is empty/],
    ])
      await assert.rejects(Sandbox.create({ mcp: config }), want)
    await assert.rejects(Sandbox.create({ mcp: { one: { runCmd: 'echo no server >&2; exit 1' } } }), /Failed to start MCP gateway: .*did not start: .*no server/s)
    assert.equal((await server.api('GET', '/v2/sandboxes')).json.length, 1)
  })
})
