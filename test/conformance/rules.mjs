// Credentials at the wall, as the official SDK asks for them: network.rules with
// secrets and identity tokens, updateNetwork, egressProxy. TestCredentials of test/e2e
// runs this file in a network namespace, where RULES_ADMIN says what the HTTPS server
// and the SOCKS5 server outside have seen.
import assert from 'node:assert/strict'
import dns from 'node:dns'
import { after, before, describe, test } from 'node:test'
import * as e2b from 'e2b'
import * as jose from 'jose'

const { Sandbox, Secret } = e2b
const admin = process.env.RULES_ADMIN
const outside = process.env.RULES_OUTSIDE
const value = 'ghp_0123456789abcdefghijABCDEFGHIJ'
const everything = ({ allTraffic }) => [allTraffic]
const made = []
const create = async (opts) => {
  const box = await Sandbox.create(opts)
  made.push(box)
  return box
}
/** seen returns the requests that the server outside got since the last call. */
const seen = async () => (await fetch(`${admin}/seen`)).json()
const proxied = async () => (await fetch(`${admin}/proxied`)).json()
const api = async (method, path, body) => {
  const r = await fetch(process.env.E2B_API_URL + path, { method, headers: { 'X-API-KEY': process.env.E2B_API_KEY, 'Content-Type': 'application/json' }, body: JSON.stringify(body) })
  return { status: r.status, json: r.status === 204 ? undefined : await r.json() }
}
/** curl runs curl inside and returns what it printed, and its exit code. */
const curl = async (box, args) => {
  const r = await box.commands.run(`curl -sS -m 15 ${args} 2>&1; echo " exit $?"`)
  return r.stdout.trim()
}
/** oneRequest runs curl inside and returns the one request that arrived outside. */
const oneRequest = async (box, args) => {
  await seen()
  const out = await curl(box, args)
  const got = await seen()
  assert.equal(got.length, 1, `${args}: ${out}: ${JSON.stringify(got)}`)
  return { ...got[0], out }
}

before(async () => {
  const made = await Secret.create('GitHub', value, { metadata: { team: 'a' } })
  assert.deepEqual([made.name, made.version, made.metadata], ['github', 1, { team: 'a' }])
})
after(async () => {
  await Promise.all(made.map((b) => b.kill()))
})

const bearer = { 'api.rules.test': [{ transform: { headers: { Authorization: 'Bearer ' + Secret.fill('github'), 'x-team': 'blue' } } }] }

describe('network.rules', () => {
  test('put a secret on requests that has never been inside', async () => {
    const box = await create({ network: { allowOut: ({ rules }) => [...rules.keys(), 'other.rules.test'], denyOut: everything, rules: bearer } })
    const r = await oneRequest(box, 'https://api.rules.test/echo?a=1 -H "Authorization: Bearer mine" -H "X-Own: kept"')
    assert.equal(r.headers.Authorization?.join(), `Bearer ${value}`)
    assert.deepEqual([r.headers['X-Team'], r.headers['X-Own'], r.host, r.uri], [['blue'], ['kept'], 'api.rules.test', '/echo?a=1'])
    assert.ok(!r.out.includes(value), 'the answer, which repeats the header, handed the value over')
    // Inside there is nothing to find.
    const inside = await box.commands.run('env; cat /proc/*/environ 2>/dev/null | tr "\\0" "\\n"; cat /run/e2b/* 2>/dev/null; true')
    assert.ok(!inside.stdout.includes(value))
    // Another host that is allowed gets nothing, and its own certificate shows that
    // nobody looked inside.
    const other = await oneRequest(box, '-k https://other.rules.test/')
    assert.equal(other.headers.Authorization, undefined)
    assert.match(await curl(box, 'https://other.rules.test/'), /certificate|SSL/i)
    assert.equal((await box.getInfo()).network.rules['api.rules.test'][0].transform.headers.Authorization, 'Bearer ${e2b.secrets.github}')
    assert.ok(!JSON.stringify(await box.getInfo()).includes(value))
  })

  test('give no access', async () => {
    const box = await create({ network: { allowOut: ['other.rules.test'], denyOut: everything, rules: bearer } })
    await seen()
    await curl(box, '-k https://api.rules.test/')
    assert.deepEqual(await seen(), [])
  })

  test('of an exact name win over those of a pattern, and never merge', async () => {
    const header = (v) => [{ transform: { headers: v } }]
    const rules = new Map([
      ['API.rules.test', header({ 'X-Exact': '1' })],
      ['*.rules.test', header({ 'X-Short': '1' })],
      ['*.eu.rules.test', header({ 'X-Long': '1' })],
    ])
    const box = await create({ network: { rules } })
    const set = async (host) => Object.keys((await oneRequest(box, `https://${host}/`)).headers).filter((h) => /^X-(Exact|Short|Long)$/.test(h)).join()
    assert.equal(await set('api.rules.test'), 'X-Exact')
    assert.equal(await set('a.rules.test'), 'X-Short')
    assert.equal(await set('eu.rules.test'), 'X-Short')
    assert.equal(await set('a.eu.rules.test'), 'X-Long')
  })

  test('can be changed and removed while the sandbox runs', async () => {
    const box = await create({ network: { rules: bearer } })
    const authorization = async () => (await oneRequest(box, '-k https://api.rules.test/')).headers.Authorization?.join()
    assert.equal(await authorization(), `Bearer ${value}`)
    await box.updateNetwork({ rules: { 'api.rules.test': [{ transform: { headers: { Authorization: 'token ${e2b.secrets.GITHUB}' } } }] } })
    assert.equal(await authorization(), `token ${value}`)
    const second = 'ghp_second_9876543210zyxwvutsrq'
    assert.equal((await Secret.update('github', second)).version, 2)
    assert.equal(await authorization(), `token ${second}`)
    await Secret.update('github', value)
    await box.updateNetwork({})
    assert.equal(await authorization(), undefined)
    assert.equal((await box.getInfo()).network.rules, undefined)
  })

  test('stay over a pause', async () => {
    const box = await create({ network: { rules: bearer } })
    await box.pause()
    const again = await Sandbox.connect(box.sandboxId)
    assert.equal((await oneRequest(again, 'https://api.rules.test/')).headers.Authorization?.join(), `Bearer ${value}`)
  })

  test('that cannot be taken are refused, and the field is named', async () => {
    const at = (headers, domain = 'api.rules.test') => ({ network: { rules: { [domain]: [{ transform: { headers } }] } } })
    for (const [body, want] of [
      [at({ A: '${e2b.secrets}' }), /^Network transform header contains a malformed E2B placeholder\./],
      [at({ A: '${e2b.secrets.nosuch}' }), /nosuch/],
      [at({ A: '${e2b.identity.tokens.nosuch}' }), /iam\.tokens/],
      [at({ Host: 'x' }), /Host/],
      [at({ A: 'a\r\nB: c' }), /printable/],
      [at({}, '*'), /rules\["\*"\]/],
      [at({}, 'x'.repeat(125) + '.test'), /128/],
      [{ network: { rules: Object.fromEntries(Array.from({ length: 11 }, (_, i) => [`h${i}.test`, []])) } }, /10/],
      [{ network: { allowOut: ['api.rules.test'] } }, /0\.0\.0\.0\/0/],
      [{ network: { egressProxy: { address: '127.0.0.1:1080' } } }, /egressProxy/],
      [{ network: { egressProxy: { address: 'proxy' } } }, /egressProxy/],
      [{ network: { egressProxy: { address: `${outside}:1080`, password: 'x' } } }, /username/],
      [{ iam: { tokens: { a: { audience: 'x', tokenType: 'X509-SVID' } } } }, /tokenType/],
    ]) {
      const r = await api('POST', '/v2/sandboxes', { templateID: 'base', ...body })
      assert.equal(r.status, 400, JSON.stringify(body))
      assert.match(r.json.message, want)
      if (body.network) {
        const box = made[0].sandboxId
        const u = await api('PUT', `/sandboxes/${box}/network`, body.network)
        assert.equal(u.status, 400, JSON.stringify(body))
      }
    }
  })

  // The Python SDK cannot be installed everywhere. It sends the same bodies to the old
  // path, and null for what its user set to None.
  test('come by the old path, with null for what is unset', async () => {
    const r = await api('POST', '/sandboxes', { templateID: 'base', secure: true, timeout: 60, iam: null, network: { allowOut: null, denyOut: null, egressProxy: null, rules: bearer } })
    assert.equal(r.status, 201, JSON.stringify(r.json))
    const box = await Sandbox.connect(r.json.sandboxID)
    made.push(box)
    assert.equal((await oneRequest(box, 'https://api.rules.test/')).headers.Authorization?.join(), `Bearer ${value}`)
    const u = await api('PUT', `/sandboxes/${r.json.sandboxID}/network`, { allowOut: null, denyOut: null, egressProxy: null, rules: null })
    assert.equal(u.status, 204)
    assert.equal((await oneRequest(box, '-k https://api.rules.test/')).headers.Authorization, undefined)
  })
})

describe('egressProxy', () => {
  const egressProxy = { address: 'proxy.rules.test:1080', username: 'agent', password: 's3cret pass' }
  test('takes all connections, with a login that is never answered', async () => {
    const box = await create({ network: { egressProxy, rules: bearer } })
    await proxied()
    assert.equal((await oneRequest(box, 'https://api.rules.test/')).headers.Authorization?.join(), `Bearer ${value}`)
    assert.equal((await oneRequest(box, '-k https://other.rules.test/')).host, 'other.rules.test')
    assert.deepEqual(await proxied(), [`${outside}:443`, `${outside}:443`])
    const info = await box.getInfo()
    assert.deepEqual(info.network.egressProxy, { address: egressProxy.address, username: 'agent' })
    assert.ok(!JSON.stringify(info).includes('s3cret'))
    await box.pause()
    await Sandbox.connect(box.sandboxId)
    await oneRequest(box, '-k https://other.rules.test/')
    assert.deepEqual(await proxied(), [`${outside}:443`])
    await box.updateNetwork({})
    await oneRequest(box, '-k https://other.rules.test/')
    assert.deepEqual(await proxied(), [])
  })

  test('that refuses the login leaves no other way', async () => {
    const box = await create({ network: { egressProxy: { ...egressProxy, password: 'guess' } } })
    await seen()
    assert.doesNotMatch(await curl(box, '-k https://other.rules.test/'), /exit 0/)
    assert.deepEqual(await seen(), [])
  })
})

describe('iam.tokens', () => {
  const lookup = dns.lookup
  before(() => {
    // The names of this test are known to the sandboxes' resolver alone.
    dns.lookup = (name, opts, done) => (name.endsWith('.rules.test') ? done(null, opts.all ? [{ address: outside, family: 4 }] : outside, 4) : lookup(name, opts, done))
  })
  after(() => {
    dns.lookup = lookup
  })
  test('are made for each request, and verified by a stock library', async () => {
    const box = await create({
      iam: { tokens: { cloud: Secret.iamToken({ audience: 'sts.rules.test', tokenType: 'JWT-SVID' }) } },
      network: { rules: { 'api.rules.test': [{ transform: ({ iam }) => ({ headers: { Authorization: `Bearer ${iam.tokens.cloud}` } }) }] } },
    })
    const token = async () => (await oneRequest(box, 'https://api.rules.test/')).headers.Authorization[0].replace(/^Bearer /, '')
    const one = await token()
    const issuer = 'https://issuer.rules.test'
    const discovery = await (await fetch(`${issuer}/.well-known/openid-configuration`)).json()
    assert.equal(discovery.issuer, issuer)
    const keys = jose.createRemoteJWKSet(new URL(discovery.jwks_uri))
    const { payload, protectedHeader } = await jose.jwtVerify(one, keys, { issuer, audience: 'sts.rules.test', maxTokenAge: '10 minutes' })
    assert.equal(protectedHeader.alg, 'ES256')
    assert.equal(payload.sandbox, box.sandboxId)
    assert.equal(payload.sub, `spiffe://issuer.rules.test/project/${payload.project}/sandbox/${box.sandboxId}`)
    assert.ok(payload.exp - payload.iat <= 600)
    await assert.rejects(jose.jwtVerify(one, keys, { issuer, audience: 'somebody.else' }))
    await assert.rejects(jose.jwtVerify(one.slice(0, -8) + 'AAAAAAAA', keys, { issuer, audience: 'sts.rules.test' }))
    const two = await jose.jwtVerify(await token(), keys, { issuer, audience: 'sts.rules.test' })
    assert.notEqual(two.payload.jti, payload.jti)
    // They stay when the rest of the network is replaced.
    await box.updateNetwork({ rules: { 'api.rules.test': [{ transform: ({ iam }) => ({ headers: { 'X-Token': iam.tokens.cloud } }) }] } })
    const three = await oneRequest(box, 'https://api.rules.test/')
    await jose.jwtVerify(three.headers['X-Token'][0], keys, { issuer, audience: 'sts.rules.test' })
  })
})

describe('secrets', () => {
  test('are created, listed, changed and destroyed; values are never answered', async () => {
    const made = await Secret.create('other', 'a-value-of-some-length')
    assert.equal(await Secret.exists('other'), true)
    const paginator = Secret.list({ limit: 1 })
    const names = []
    while (paginator.hasNext) names.push(...(await paginator.nextItems()).map((s) => s.name))
    assert.deepEqual(names.sort(), ['github', 'other'])
    assert.deepEqual((await Secret.getInfo(made.secretId)).name, 'other')
    const r = await (await fetch(process.env.E2B_API_URL + '/secrets', { headers: { 'X-API-KEY': process.env.E2B_API_KEY } })).text()
    assert.ok(!r.includes('a-value-of') && !r.includes(value))
    await assert.rejects(Secret.create('other', 'another-value-of-length'))
    // Postern's own: where the value goes.
    const placed = { 'postern.hosts': 'login.rules.test', 'postern.headers': 'x-key', 'postern.places': 'form:client_secret POST login.rules.test/token; path GET login.rules.test/bot{secret}/*' }
    await Secret.update(made.secretId, 'a-value-of-some-length', { metadata: placed })
    assert.deepEqual((await Secret.getInfo(made.secretId)).metadata, { ...placed, 'postern.headers': 'X-Key' })
    await assert.rejects(Secret.update(made.secretId, 'a-value-of-some-length', { metadata: { 'postern.places': 'body POST login.rules.test/' } }), /postern.places|places\[0\]/)
    assert.equal(await Secret.destroy('other'), true)
    assert.equal(await Secret.destroy('other'), false)
    assert.equal(await Secret.exists('other'), false)
  })
})
