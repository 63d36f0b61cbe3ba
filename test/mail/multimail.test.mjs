// Programs for MultiMail against this server. The requests are those that each of the 46
// tools of MultiMail's MCP server 0.7.0 makes, by its public source. No registry that the
// tests use has its package; where it is installed, MULTIMAIL_MCP names its index.js, and
// the same test calls the tools of the program itself. test/e2e runs this file and passes
// the server in the environment.
import assert from 'node:assert/strict'
import { spawn, execFile } from 'node:child_process'
import { createHmac } from 'node:crypto'
import { createServer } from 'node:http'
import { createInterface } from 'node:readline'
import { test, before, after } from 'node:test'
import { setTimeout as sleep } from 'node:timers/promises'
import nodemailer from 'nodemailer'

const { POSTERN_URL: base, POSTERN_SMTP: smtp, POSTERN_BINARY: binary, POSTERN_DATA: data, MULTIMAIL_KEY: agent, MULTIMAIL_MCP: program } = process.env
const api = base + '/multimail'

const postern = (...args) =>
  new Promise((done, failed) => execFile(binary, [...args, '--data', data], { env: { ...process.env, POSTERN_URL: undefined } }, (err, out, errors) => (err ? failed(new Error(out + errors)) : done(out))))

async function eventually(what, f, seconds = 60) {
  for (const end = Date.now() + seconds * 1000; ; await sleep(50)) {
    const got = await f()
    if (got) return got
    if (Date.now() > end) throw new Error(`${what}: not within ${seconds} s`)
  }
}

async function deliver(mail) {
  const [host, port] = smtp.split(':')
  const transport = nodemailer.createTransport({ host, port: Number(port), secure: false, ignoreTLS: true })
  return transport.sendMail({ from: 'Bob <bob@example.com>', text: 'Hello', ...mail })
}

/** request makes one request and returns its JSON, or throws what its error says. */
async function request(key, method, path, body) {
  const res = await fetch(api + path, {
    method,
    headers: { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) },
    body: body && JSON.stringify(body),
  })
  const type = res.headers.get('content-type') ?? ''
  if (!type.startsWith('application/json')) {
    assert.ok(res.ok, `${method} ${path}: ${res.status} ${type}`)
    return Buffer.from(await res.arrayBuffer())
  }
  const answer = await res.json()
  if (!res.ok) throw Object.assign(new Error(`${res.status} ${answer.error}`), { answer })
  return answer
}

const q = (o) => {
  const s = new URLSearchParams(Object.entries(o).filter(([, v]) => v !== undefined)).toString()
  return s && '?' + s
}
const mb = ({ mailbox_id: id }) => `/v1/mailboxes/${encodeURIComponent(id)}`
const of = (a) => `${mb(a)}/emails/${encodeURIComponent(a.email_id)}`
const without = (o, ...names) => Object.fromEntries(Object.entries(o).filter(([k]) => !names.includes(k)))

/** tools are the requests of each tool: method, path and body of one, or a function. */
const tools = {
  request_challenge: (a) => ['POST', '/v1/account/challenge', a],
  create_account: (a) => ['POST', '/v1/account', { ...a, email_use_type: 'transactional' }],
  activate_account: (a) => ['POST', '/v1/confirm', a],
  resend_confirmation: (a) => ['POST', '/v1/account/resend-confirmation', a],
  list_mailboxes: () => ['GET', '/v1/mailboxes'],
  send_email: (a) => ['POST', `${mb(a)}/send`, without(a, 'mailbox_id')],
  schedule_email: (a) => ['POST', `${mb(a)}/send`, without(a, 'mailbox_id')],
  check_inbox: (a) => ['GET', `${mb(a)}/emails${q(without(a, 'mailbox_id'))}`],
  read_email: (a) => ['GET', of(a)],
  reply_email: (a) => ['POST', `${mb(a)}/reply/${a.email_id}`, without(a, 'mailbox_id', 'email_id')],
  get_thread: (a) => ['GET', `${mb(a)}/threads/${a.thread_id}`],
  cancel_message: (a) => ['POST', `${of(a)}/cancel`],
  edit_scheduled_email: (a) => ['PATCH', `${of(a)}/schedule`, without(a, 'mailbox_id', 'email_id')],
  update_mailbox: (a) => ['PATCH', mb(a), without(a, 'mailbox_id')],
  configure_mailbox: (a) => ['PATCH', `${mb(a)}/configure`, { ...without(a, 'mailbox_id'), mcp_configured: 1 }],
  update_account: (a) => ['PATCH', '/v1/account', a],
  delete_mailbox: (a) => ['DELETE', mb(a)],
  tag_email: (a) =>
    a.action === 'set' ? ['PUT', `${of(a)}/tags`, { tags: a.tags }] : a.action === 'delete' ? ['DELETE', `${of(a)}/tags/${a.key}`] : ['GET', `${of(a)}/tags`],
  add_contact: (a) => ['POST', '/v1/contacts', a],
  search_contacts: (a) => ['GET', `/v1/contacts${q({ q: a.query })}`],
  delete_contact: (a) => ['DELETE', `/v1/contacts/${a.contact_id}`],
  get_account: () => ['GET', '/v1/account'],
  create_mailbox: (a) => ['POST', '/v1/mailboxes', { address_local: a.address_local_part, ...without(a, 'address_local_part') }],
  request_upgrade: (a) => ['POST', `${mb(a)}/request-upgrade`, { target_mode: a.target_mode }],
  apply_upgrade: (a) => ['POST', `${mb(a)}/upgrade`, { code: a.code }],
  get_usage: (a) => ['GET', `/v1/usage${q(a)}`],
  list_pending: () => ['GET', '/v1/oversight/pending'],
  decide_email: (a) => ['POST', '/v1/oversight/decide', a],
  report_spam: (a) => ['POST', `/v1/emails/${a.email_id}/report-spam`],
  not_spam: (a) => ['POST', `/v1/emails/${a.email_id}/not-spam`],
  list_spam: (a) => ['GET', `/v1/emails${q(a)}`],
  check_suppression: (a) => ['GET', `/v1/suppression${q(a)}`],
  remove_suppression: (a) => ['DELETE', `/v1/suppression/${encodeURIComponent(a.email_address)}`],
  list_api_keys: () => ['GET', '/v1/api-keys'],
  create_api_key: (a) => ['POST', '/v1/api-keys', a],
  revoke_api_key: (a) => ['DELETE', `/v1/api-keys/${a.key_id}`],
  get_audit_log: (a) => ['GET', `/v1/audit-log${q(a)}`],
  delete_account: (a) => ['DELETE', '/v1/account', a],
  get_billing_portal: () => ['POST', '/v1/billing/portal'],
  upgrade_plan: (a) => ['POST', '/v1/billing/checkout', a],
  cancel_subscription: (a) => ['POST', '/v1/billing/cancel', a],
  create_webhook: (a) => ['POST', '/v1/webhooks', a],
  list_webhooks: () => ['GET', '/v1/webhooks'],
  delete_webhook: (a) => ['DELETE', `/v1/webhooks/${a.webhook_id}`],
  download_attachment: async (a, key) => {
    const path = `${of(a)}/attachments/${encodeURIComponent(a.filename)}`
    const { size_bytes, content_type } = await request(key, 'GET', `${path}/url`)
    const file = await request(key, 'GET', path)
    return { filename: a.filename, content_type, size_bytes, content_base64: file.toString('base64') }
  },
  wait_for_email: async (a, key) => {
    const { emails } = await request(key, 'GET', `${mb(a)}/emails?limit=1`)
    const query = q({ since_id: emails[0]?.id, status: 'unread', limit: 5, ...a.filter })
    return eventually('an email', async () => {
      const got = await request(key, 'GET', `${mb(a)}/emails${query}`)
      return got.emails.length > 0 && { found: true, emails: got.emails }
    })
  },
}

/** A Program is MultiMail's MCP server itself, spoken to over its standard streams. */
class Program {
  #next = 0
  #waiting = new Map()
  constructor(key) {
    this.child = spawn(process.execPath, [program], { env: { ...process.env, MULTIMAIL_API_URL: api, MULTIMAIL_API_KEY: key }, stdio: ['pipe', 'pipe', 'inherit'] })
    createInterface({ input: this.child.stdout }).on('line', (line) => {
      const m = JSON.parse(line)
      this.#waiting.get(m.id)?.(m)
    })
    this.ready = this.ask('initialize', { protocolVersion: '2025-06-18', capabilities: {}, clientInfo: { name: 'test', version: '1' } }).then(() =>
      this.child.stdin.write(JSON.stringify({ jsonrpc: '2.0', method: 'notifications/initialized' }) + '\n'),
    )
  }
  ask(method, params) {
    const id = ++this.#next
    return new Promise((done) => {
      this.#waiting.set(id, done)
      this.child.stdin.write(JSON.stringify({ jsonrpc: '2.0', id, method, params }) + '\n')
    })
  }
  async call(tool, args) {
    await this.ready
    const { result, error } = await this.ask('tools/call', { name: tool, arguments: args })
    if (error) throw new Error(error.message)
    const [first, second] = result.content.map((c) => c.text)
    if (result.isError) throw new Error(first)
    const out = JSON.parse(first)
    return second ? { ...out, markdown: second } : out
  }
}

const programs = new Map()
const called = new Set()

/** call calls a tool with a key, by the program itself or by the requests that it makes. */
async function call(key, tool, args = {}) {
  called.add(tool)
  if (!program) {
    const how = tools[tool](args, key)
    return Array.isArray(how) ? request(key, ...how) : how
  }
  if (!programs.has(key)) programs.set(key, new Program(key))
  return programs.get(key).call(tool, args)
}

const mine = (tool, args) => call(agent, tool, args)
const refused = (promise, words) => assert.rejects(promise, words)

let person // a session's token
let box // of the agent
const hooked = []
const receiver = createServer((req, res) => {
  let body = ''
  req.on('data', (b) => (body += b))
  req.on('end', () => {
    hooked.push({ headers: req.headers, body })
    res.writeHead(204).end()
  })
})

before(async () => {
  await new Promise((done) => receiver.listen(0, '127.0.0.1', done))
  const res = await fetch(`${base}/v1/session`, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({ name: 'ann', password: 'correct horse battery' }),
  })
  person = (await res.json()).token
  assert.match(person, /^pse_/)
})
after(() => {
  receiver.close()
  for (const p of programs.values()) p.child.kill()
})

test('an account makes mailboxes, and finds what it is', async () => {
  assert.deepEqual((await mine('list_mailboxes')).mailboxes, [])
  box = await mine('create_mailbox', { address_local_part: 'helper', display_name: 'Helper' })
  assert.equal(box.address, 'helper@agents.internal')
  const [first] = (await mine('list_mailboxes')).mailboxes
  assert.equal(first.id, box.id)
  assert.equal(first.oversight_mode, 'gated_send')
  assert.equal((await mine('get_account')).max_mailboxes, 25)
  await mine('update_mailbox', { mailbox_id: box.id, display_name: 'The Helper' })
  const set = await mine('configure_mailbox', { mailbox_id: box.id, oversight_mode: 'gated_send', scheduling_enabled: true })
  assert.equal(set.display_name, 'The Helper')
  await refused(mine('create_mailbox', { address_local_part: 'helper' }), /taken|in use/)
  await refused(mine('configure_mailbox', { mailbox_id: box.id, oversight_mode: 'autonomous' }), /an owner decides/)
})

test('a send waits for a person, who decides on what was listed', async () => {
  const letter = {
    mailbox_id: box.id, to: ['ann@example.net'], bcc: ['hidden@example.net'], subject: 'Report', markdown: '**Done**', idempotency_key: 'report-1',
    attachments: [{ name: 'a.txt', content_base64: Buffer.from('file').toString('base64'), content_type: 'text/plain' }],
  }
  const sent = await mine('send_email', letter)
  assert.equal(sent.status, 'pending_send_approval')
  assert.deepEqual(await mine('send_email', letter), { id: sent.id, status: 'already_sent', idempotent: true })
  await refused(mine('send_email', { ...letter, idempotency_key: undefined }), /a moment ago/)
  // The agent's key neither sees the queue nor decides.
  await refused(mine('list_pending'), /only a signed-in person decides/)
  await refused(mine('decide_email', { email_id: sent.id, action: 'approve' }), /only a signed-in person decides/)
  const [waits] = (await call(person, 'list_pending')).emails
  assert.equal(waits.action_id, sent.id)
  assert.deepEqual(waits.to, ['ann@example.net', 'hidden@example.net'])
  await refused(call(person, 'decide_email', { email_id: sent.id, action: 'approve' }), /GET \/v1\/oversight\/pending/)
  assert.equal((await call(person, 'decide_email', { email_id: waits.id, action: 'reject', reason: 'not yet' })).status, 'rejected')
  const read = await mine('read_email', { mailbox_id: box.id, email_id: sent.id })
  assert.equal(read.status, 'rejected')
  assert.equal(read.reason, 'not yet')

  // To another agent of this server it leaves.
  const again = await mine('send_email', { mailbox_id: box.id, to: [box.address], subject: 'To myself', markdown: 'Hello, *me*' })
  const [next] = (await call(person, 'list_pending')).emails
  assert.equal((await call(person, 'decide_email', { email_id: next.id, action: 'approve' })).status, 'approved')
  await eventually('it arrives', async () => (await mine('check_inbox', { mailbox_id: box.id, status: 'unread' })).emails.length === 1)
  // It arrives before the gate has written down that it left.
  await eventually('it is sent', async () => (await mine('read_email', { mailbox_id: box.id, email_id: again.id })).status === 'sent')
})

test('mail arrives, is read, tagged and answered', async () => {
  const [wait] = await Promise.all([
    mine('wait_for_email', { mailbox_id: box.id, timeout_seconds: 60, filter: { subject_contains: 'question' } }),
    sleep(300).then(() => deliver({ to: box.address, subject: 'A question', text: 'How much?', attachments: [{ filename: 'list.csv', content: 'a,1\n' }] })),
  ])
  assert.equal(wait.found, true)
  const [{ id, thread_id: thread }] = wait.emails
  const at = { mailbox_id: box.id, email_id: id }
  const read = await mine('read_email', at)
  assert.equal(read.status, 'read')
  assert.equal(read.from, 'bob@example.com')
  assert.match(read.markdown, /How much\?/)
  const file = await mine('download_attachment', { ...at, filename: read.attachments[0].name })
  assert.equal(Buffer.from(file.content_base64, 'base64').toString(), 'a,1\n')
  assert.deepEqual((await mine('tag_email', { ...at, action: 'set', tags: { priority: 'high', due: 'friday' } })).tags, { priority: 'high', due: 'friday' })
  await mine('tag_email', { ...at, action: 'delete', key: 'due' })
  assert.deepEqual((await mine('tag_email', { ...at, action: 'get' })).tags, { priority: 'high' })
  assert.equal((await mine('get_thread', { mailbox_id: box.id, thread_id: thread })).has_unanswered_inbound, true)
  const answer = await mine('reply_email', { ...at, markdown: 'Ten.' })
  assert.equal(answer.thread_id, thread)
  await refused(mine('reply_email', { ...at, markdown: 'Ten.' }), /409.*a moment ago/)
  assert.equal((await mine('cancel_message', { mailbox_id: box.id, email_id: answer.id })).status, 'cancelled')
  assert.deepEqual((await mine('check_inbox', { mailbox_id: box.id, status: 'cancelled' })).emails.map((e) => e.id), [answer.id])
})

test('scheduled mail is changed and cancelled', async () => {
  const at = (hours) => new Date(Date.now() + hours * 3600e3).toISOString().replace(/\.\d+/, '')
  const later = await mine('schedule_email', { mailbox_id: box.id, to: ['ann@example.net'], subject: 'Later', markdown: 'x', send_at: at(1), gate_timing: 'schedule_first' })
  assert.equal(later.status, 'scheduled')
  const email = { mailbox_id: box.id, email_id: later.id }
  assert.equal((await mine('edit_scheduled_email', { ...email, send_at: at(2), subject: 'Even later' })).status, 'scheduled')
  assert.equal((await mine('read_email', email)).subject, 'Even later')
  assert.equal((await mine('cancel_message', email)).status, 'cancelled')
})

test('spam is reported and restored', async () => {
  await deliver({ to: box.address, subject: 'Win a prize' })
  const list = await eventually('it arrives', async () => {
    const { emails } = await mine('check_inbox', { mailbox_id: box.id, subject_contains: 'prize' })
    return emails.length === 1 && emails
  })
  assert.equal((await mine('report_spam', { email_id: list[0].id })).status, 'spam_quarantined')
  assert.deepEqual((await mine('list_spam', { limit: 10 })).emails.map((e) => e.id), [list[0].id])
  assert.equal((await mine('not_spam', { email_id: list[0].id })).status, 'unread')
  assert.deepEqual((await mine('list_spam')).emails, [])
})

test('contacts', async () => {
  const saved = await mine('add_contact', { name: 'Ann', email: 'ann@example.net', tags: ['boss'] })
  assert.deepEqual((await mine('search_contacts', { query: 'ann' })).contacts.map((c) => c.id), [saved.id])
  assert.equal((await mine('delete_contact', { contact_id: saved.id })).deleted, true)
  assert.deepEqual((await mine('search_contacts')).contacts, [])
})

test('keys read and send, and never decide', async () => {
  await refused(mine('create_api_key', { name: 'x', scopes: ['send', 'oversight'] }), /no key decides/)
  const made = await mine('create_api_key', { name: 'reader', scopes: ['read'] })
  assert.match(made.api_key, /^mm_live_/)
  assert.equal((await call(made.api_key, 'check_inbox', { mailbox_id: box.id, limit: 1 })).emails.length, 1)
  await refused(call(made.api_key, 'send_email', { mailbox_id: box.id, to: ['ann@example.net'], subject: 's', markdown: 't' }), /not send/)
  assert.ok((await mine('list_api_keys')).api_keys.some((k) => k.id === made.id))
  assert.equal((await mine('revoke_api_key', { key_id: made.id })).status, 'revoked')
  await refused(call(made.api_key, 'check_inbox', { mailbox_id: box.id }), /40[13]|scope|Invalid API key/)
})

test('a looser mode is an owner’s to give', async () => {
  const asked = await mine('request_upgrade', { mailbox_id: box.id, target_mode: 'monitored' })
  assert.equal(asked.status, 'upgrade_requested')
  await refused(mine('apply_upgrade', { mailbox_id: box.id, code: 'AAAA-AAAA-AAAA-AAAA' }), /the code is wrong/)
  const code = (await postern('inbox', 'code', box.address, 'monitored', '--reason', 'three good weeks')).match(/[A-Z2-7]{4}(-[A-Z2-7]{4}){3}/)[0]
  assert.equal((await mine('apply_upgrade', { mailbox_id: box.id, code })).oversight_mode, 'monitored')
})

test('webhooks wait for a person, and are signed', async () => {
  const url = `http://127.0.0.1:${receiver.address().port}/hook`
  const hook = await mine('create_webhook', { url, events: ['message.received'], mailbox_id: box.id })
  assert.equal(hook.status, 'waiting')
  await postern('approve', hook.action_id)
  await eventually('it is active', async () => (await mine('list_webhooks')).subscriptions[0].status === 'active')
  await deliver({ to: box.address, subject: 'hook' })
  await eventually('it is told', () => hooked.length > 0)
  const [{ headers, body }] = hooked
  assert.equal(headers['x-multimail-signature'], 'sha256=' + createHmac('sha256', hook.signing_secret).update(body).digest('hex'))
  const told = JSON.parse(body)
  assert.equal(told.event, 'message.received')
  assert.equal(told.data.mailbox_id, box.id)
  const deliveries = await eventually('it is recorded', async () => {
    const { deliveries } = await request(agent, 'GET', '/v1/webhook-deliveries')
    return deliveries.some((d) => d.status === 'delivered') && deliveries
  })
  assert.equal(deliveries[0].webhook_id, hook.id)
  assert.equal((await mine('delete_webhook', { webhook_id: hook.id })).status, 'deleted')
})

test('usage, the record and suppression', async () => {
  const usage = await mine('get_usage')
  assert.equal(usage.emails_sent, 1)
  assert.ok(usage.emails_received >= 4, JSON.stringify(usage))
  assert.ok((await mine('get_usage', { period: 'daily' })) !== undefined)
  await refused(mine('get_audit_log'), /only a signed-in person/)
  assert.ok((await call(person, 'get_audit_log', { limit: 5 })).entries.length === 5)
  await refused(mine('check_suppression'), /may not|only|cannot|manage/)
  await refused(call(person, 'check_suppression'), /keyed hashes/)
  await refused(mine('remove_suppression', { email_address: 'ann@example.net' }), /may not|only|cannot|manage/)
  await refused(call(person, 'remove_suppression', { email_address: 'ann@example.net' }), /404/)
})

test('what a key must not do, and what is not here, says so', async () => {
  await refused(mine('update_account', { oversight_email: 'eve@evil.example' }), /no key changes who oversees it/)
  await refused(mine('delete_account'), /no key deletes an account/)
  for (const tool of ['get_billing_portal', 'cancel_subscription']) await refused(mine(tool), /nothing is billed/)
  await refused(mine('upgrade_plan', { plan: 'pro' }), /nothing is billed/)
  const signUp = /postern account create --multimail/
  await refused(mine('request_challenge'), signUp)
  const pow_solution = { algorithm: 'SHA-256', challenge: 'x', number: 1, salt: 'x', signature: 'x' }
  const accepted = { accepted_tos: true, accepted_operator_agreement: true, accepted_anti_spam_policy: true }
  await refused(mine('create_account', { operator_name: 'x', oversight_email: 'ann@example.net', ...accepted, pow_solution }), signUp)
  await refused(mine('activate_account', { code: 'SKP-7D2-4V8' }), signUp)
  await refused(mine('resend_confirmation', { oversight_email: 'ann@example.net' }), signUp)
  for (const method of ['GET', 'POST']) await refused(request('', method, '/v1/approve/abc'), /no link decides/)
  await refused(request('mm_live_AAAAAAAAAAAAAAAAAAAAAAAAAA', 'GET', '/v1/mailboxes'), /401/)
})

test('a mailbox is deleted, and every tool was called', async () => {
  assert.equal((await mine('delete_mailbox', { mailbox_id: box.id })).status, 'deleted')
  assert.deepEqual((await mine('list_mailboxes')).mailboxes, [])
  assert.deepEqual([...called].sort(), Object.keys(tools).sort())
  if (!program) return
  const { result } = await programs.get(agent).ask('tools/list', {})
  assert.deepEqual(result.tools.map((t) => t.name).sort(), Object.keys(tools).sort())
})
