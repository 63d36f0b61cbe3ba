// Tests oversight in a real browser:
//
//   node oversight.mjs BASE_URL SETUP_LINK OUT_DIR STAGE_URL
//
// STAGE_URL is a server of the Go test that makes agents propose and other people
// decide during the test. The first part runs without JavaScript and covers every
// page and every decision. The second part covers the console's only script, which
// must not lose a page's state. The test saves screenshots of every page in OUT_DIR.
// It prints a line for each check and exits with status 0 if all passed.
import { base, check, complaints, fill, finish, foreign, link, name, open, out, password, pictures, rest } from './kit.mjs'
import { join } from 'node:path'
import { mkdirSync } from 'node:fs'

const stage = rest[0]
async function play(deed, args = {}) {
  const answer = await fetch(`${stage}/${deed}?${new URLSearchParams(args)}`)
  if (!answer.ok) throw new Error(`${deed}: ${await answer.text()}`)
  return answer.json()
}
const usual = { reason: 'no rule allows it: a person decides' }
const at = (path) => new URL(path, base).href
const action = (a) => at(`/console/actions/${a.id}`)
const text = (page) => page.locator('main').innerText()
const state = (page) => page.locator('#standing [data-state]').getAttribute('data-state')

// eventually waits for a condition, long enough for a busy machine.
async function eventually(what, ask) {
  for (let i = 0; i < 600; i++) {
    if (await ask().catch(() => false)) return check(what, true)
    await new Promise((resolve) => setTimeout(resolve, 200))
  }
  return check(what, false, 'not within 2 minutes')
}

async function decisions(context) {
  const page = await context.newPage()
  await page.goto(at('/console/review'))
  check('an empty queue says that nothing waits', (await text(page)).includes('Nothing is waiting'))

  // A report with all parts of a mail, and a comment on it.
  const report = await play('propose', { name: 'report', kind: 'report' })
  await page.goto(action(report))
  const frame = page.frameLocator('.mailview iframe.mail')
  check('the rendered view and the plain text are both shown', await frame.getByRole('heading', { name: 'Totals by region' }).isVisible() && (await page.locator('pre.text').first().innerText()).includes('north 150'))
  const [queue, detail, bar] = [await page.locator('section.queue').boundingBox(), await page.locator('article.detail').boundingBox(), await page.locator('#bar').boundingBox()]
  check('the queue is beside the action', queue.x + queue.width <= detail.x + 1)
  check('the decision bar is in view before scrolling', bar.y + bar.height <= 901, JSON.stringify(bar))
  check('the bar says what an approval does', /Sends these exact .* to 3 addresses, 1 of them hidden, at once\. It cannot be called back\./.test(await page.locator('#bar').innerText()), await page.locator('#bar').innerText())
  check('a remote image is not fetched, and the page says so', (await text(page)).includes('not loaded') && await frame.getByText('picture, not fetched: Shop').isVisible())
  check('the agent\'s context is shown', (await page.getByLabel('Context', { exact: true }).innerText()).includes('before the meeting on Friday'))
  await page.locator('#d-source summary').click()
  check('the source of the message is shown', (await page.getByLabel('Source').innerText()).includes('Content-Type: multipart/'))
  const [saved] = await Promise.all([page.waitForEvent('download'), page.getByRole('link', { name: 'Save totals.csv' }).click()])
  check('an attachment is downloaded under its name', saved.suggestedFilename() === 'totals.csv', saved.suggestedFilename())
  await page.locator('#s-talk summary').click()
  await page.getByLabel('Add a comment').fill('Is <b>this</b> the last one?')
  await page.getByRole('button', { name: 'Comment' }).click()
  check('a comment is shown as text, not as HTML', (await page.locator('.talk').innerText()).includes('Is <b>this</b> the last one?'))

  // An edit and its diff.
  await page.goto(action(report))
  await page.locator('#edit').click()
  await page.locator('#text').fill('Dear Bob,\n\nhere is last week.\n\nnorth 151\nsouth 98\n')
  await page.locator('#bcc').fill('')
  await page.getByRole('button', { name: /Save as new version/ }).click()
  const changes = page.locator('[aria-labelledby=s-changes] .diff')
  check('an edited action shows deletions and insertions', (await changes.locator('del').allInnerTexts()).join('|').includes('eve@hidden.example') && (await changes.locator('ins').allInnerTexts()).join('|').includes('north 151'))

  // The agent revises the action after the reviewer has opened it.
  const swapped = await play('propose', { name: 'swapped', kind: 'note', subject: 'Before' })
  await page.goto(action(swapped))
  await play('revise', { name: 'swapped' })
  await page.locator('#approve').click()
  check('approving an outdated version is refused with an error text', /changed nothing/.test(await page.getByRole('alert').innerText()) && await state(page) === 'pending', await text(page))
  check('the refusal shows the current version', (await text(page)).includes('Something else entirely'))

  // Two reviewers decide at once.
  const both = await play('propose', { name: 'both', kind: 'note', subject: 'Two at once' })
  const [one, two] = [await context.newPage(), await context.newPage()]
  await one.goto(action(both))
  await two.goto(action(both))
  await two.locator('[popovertarget=reject-sheet]').first().click()
  await two.locator('#reason').fill('not today')
  // The refused page may load itself anew after two seconds, so the alerts are counted in what was sent.
  const alerts = (html) => html.split('role="alert"').length - 1
  const decide = async (p, button) => {
    const [r] = await Promise.all([p.waitForResponse((r) => r.request().method() === 'POST'), p.locator(button).click()])
    return r.ok() || r.status() === 409 ? alerts(await r.text()) : p.getByRole('alert').count()
  }
  const told = (await Promise.all([decide(one, '#approve'), decide(two, '#reject')])).reduce((a, b) => a + b)
  check('of two concurrent decisions exactly one is refused', told === 1, `${told} were told`)
  const settled = (await play('state', { name: 'both' })).state
  check('the other decision takes effect', ['approved', 'denied'].includes(settled), settled)
  await one.close()
  await two.close()

  // Policy requires two approvers.
  await play('verdict', { rule: 'large', reason: 'more than ten thousand: two people', approvers: '2' })
  const large = await play('propose', { name: 'large', kind: 'note', subject: 'An order of 12,000' })
  await page.goto(action(large))
  await page.locator('#approve').click()
  check('the next action opens after a decision, with a line of what was done', /\/console\/actions\/act_/.test(page.url()) && !page.url().includes(`/actions/${large.id}`) && /Your approval of “An order of 12,000” counts: 1 of 2/.test(await page.locator('.flash').innerText()), page.url())
  await page.goto(action(large))
  check('the first of two approvals is counted', /You approved this/.test(await text(page)) && await state(page) === 'pending')
  check('the page names the first approver', /1 of 2 so far:\s*ann/.test(await text(page)), await text(page))
  await play('decide', { name: 'large' })
  await play('drain')
  await page.goto(action(large))
  check('the second approval releases the action', await state(page) === 'done', await state(page))

  // Policy requires a second factor, or other approvers.
  await play('verdict', { rule: 'money', reason: 'about money: with a second factor', stepup: '1' })
  const money = await play('propose', { name: 'money', kind: 'note', subject: 'Transfer' })
  await page.goto(action(money))
  check('the approve button needs a second factor first', await page.locator('#prove').isVisible() && await page.locator('#approve').count() === 0)
  await page.locator('#prove').click()
  check('the button leads to the second-factor page', new URL(page.url()).pathname === '/console/stepup', page.url())
  await play('verdict', { rule: 'legal', reason: 'legal looks at contracts', who: 'carol,role:reviewer' })
  await play('propose', { name: 'legal', kind: 'note', subject: 'A contract' })
  await play('verdict', { rule: 'legal', reason: 'legal looks at contracts', who: 'carol' })
  const legal = await play('propose', { name: 'others', kind: 'note', subject: 'Another contract' })
  await page.goto(action(legal))
  check('a person who is not an approver has no buttons', await page.locator('#approve, #reject').count() === 0 && (await text(page)).includes('Policy assigns this decision'))
  await play('verdict', usual)

  // Filters, and decisions on several actions at once.
  const many = []
  for (const n of [1, 2, 3]) many.push(await play('propose', { name: `many${n}`, kind: 'note', subject: `Note ${n}` }))
  await play('mode')
  await play('allow')
  await page.goto(at('/console/review'))
  const all = Number(await page.locator('#kinds .chip[aria-current] .num').innerText())
  await page.locator('#kinds .chip', { hasText: 'Modes' }).click()
  check('the filter shows only the selected kind', await page.locator('.row').count() === 1 && all > 5, `${await page.locator('.row').count()} of ${all}`)
  await page.locator('.row').click()
  check('the filter stays while a person goes through the queue', new URL(page.url()).searchParams.get('kind') === 'inbox.mode' && /1 of 1/.test(await page.locator('.detail-nav').innerText()), page.url())
  await page.goto(at('/console/review'))
  await page.locator('#q').fill('partner.example')
  await page.locator('#q').press('Enter')
  check('a search without a script finds recipients', new URL(page.url()).searchParams.get('q') === 'partner.example' && await page.locator('.row').count() >= 3, page.url())
  await page.goto(at('/console/batch'))
  check('a batch has a box for each action that can be decided there', await page.locator(many.map((a) => `#c-${a.id}`).join(', ')).count() === 3, `${page.url()}: ${await text(page)}`)
  for (const a of many.slice(0, 2)) await page.locator(`#c-${a.id}`).check()
  await play('revise', { name: 'many2' })
  await page.locator('#approve-all').click()
  const answers = await text(page)
  check('a batch approves unchanged actions and refuses changed ones', /Note 1\s+approved/.test(answers) && /changed since it was shown/.test(answers), answers)
  check('a batch leaves unticked actions pending', (await play('state', { name: 'many3' })).state === 'pending')
  await play('drain')

  // Modes, the allow list, a policy change and a kill switch.
  const inbox = `/console/inboxes/${report.inbox}`
  await page.goto(at(inbox))
  await page.getByLabel('Address, or *@domain').fill('*@shop.example')
  await page.getByRole('button', { name: 'Add', exact: true }).click()
  check('an owner adds an entry to the allow list', (await text(page)).includes('*@shop.example'))
  await page.getByLabel(/^gated_all/).check()
  await page.getByRole('button', { name: 'Set mode' }).click()
  check('an owner sets a stricter mode', /Mode\s*gated_all/.test(await text(page)), await text(page))
  await page.goto(at('/console/policy/draft'))
  await page.locator('#try').click()
  check('a policy draft is tested', /1 of 1 test passes|1 of 1 tests pass/.test(await page.locator('#tried').innerText()), await text(page))
  const was = await page.locator('#text').inputValue()
  await page.locator('#text').fill(`# weekly review\n${was}`)
  await page.locator('#why').fill('a comment for those who come after')
  await page.locator('#propose').click()
  check('proposing a policy draft creates an action', /Change of policy/.test(await text(page)) && /\/console\/actions\/act_/.test(page.url()), await text(page))
  const change = new URL(page.url()).pathname
  await page.goto(at('/console/switches'))
  await page.getByLabel('Everything to one domain and its subdomains').check()
  await page.locator('#domain').fill('partner.example')
  await page.locator('#reason').fill('They say that they were flooded.')
  await page.getByRole('button', { name: 'Stop now' }).click()
  check('a kill switch stops a domain', (await text(page)).includes('Stopped: everything to one domain partner.example'), await text(page))
  await page.goto(at(`/console/actions/${many[2].id}`))
  check('a stopped action cannot be approved', await page.locator('#approve').count() === 0 && (await text(page)).includes('blocks approval'))
  await page.close()
  return { report, inbox, change, legal, large, money }
}

async function attacks(context) {
  const page = await context.newPage()
  const evil = await play('propose', { name: 'evil', kind: 'hostile' })
  const before = foreign.length
  for (const path of ['/console/review', '/console/batch', `/console/actions/${evil.id}`, `/console/actions/${evil.id}/edit`]) {
    await page.goto(at(path))
    check(`scripts in a subject, a name or a file do not run: ${path.replace(evil.id, 'ID')}`, (await page.title()) !== 'owned' && (await page.content()).includes('&lt;script&gt;document.title'), await page.title())
  }
  await page.goto(action(evil))
  const inner = page.frames().find((f) => f.url().includes('/frame'))
  await page.frameLocator('.mailview iframe.mail').locator('#bait').click()
  await page.frameLocator('.mailview iframe.mail').locator('#lure').click({ force: true, timeout: 5000 }).catch(() => {})
  check('a link and a button in a rendered mail do nothing', inner.url().includes(`/console/actions/${evil.id}/frame?digest=`) && page.url() === action(evil), `${inner.url()} ${page.url()}`)
  check('rendering the mail loads nothing from another host', foreign.length === before, foreign.join(' '))
  const direct = await page.goto(`${action(evil)}/frame?digest=${'0'.repeat(64)}`)
  check('the rendered view is refused for another digest', direct.status() === 409, direct.status())
  await page.close()
  return evil
}

async function live(signedIn) {
  const context = await open({ javaScriptEnabled: true, storageState: signedIn })
  const page = await context.newPage()
  await page.goto(at('/console/review?group=none&sort=age'))
  const waiting = () => page.title().then((t) => Number(/^\((\d+)\)/.exec(t)?.[1] ?? 0))
  const first = await waiting()
  await play('propose', { name: 'live', kind: 'note', subject: 'Live one' })
  await eventually('a new action appears without a reload', () => page.getByRole('link', { name: 'Live one' }).isVisible())
  await eventually('the title counts the new action', async () => await waiting() === first + 1)
  await eventually('the navigation counts the new action', async () => Number(await page.locator('#waiting').innerText()) === first + 1)

  // An update must not lose typed text.
  await page.locator('#q').fill('part')
  await play('propose', { name: 'live2', kind: 'note', subject: 'Live two' })
  await eventually('the list is updated while a field is being filled in', () => page.getByRole('link', { name: 'Live two' }).isVisible())
  check('an update keeps typed text', await page.locator('#q').inputValue() === 'part')

  // An action must not change under the pointer: the reviewer would approve something unseen.
  const a = await play('propose', { name: 'live3', kind: 'note', subject: 'Live three' })
  await page.goto(action(a))
  await page.locator('[popovertarget=reject-sheet]').first().click()
  await page.locator('#reason').fill('I am writing this')
  await play('revise', { name: 'live3' })
  await eventually('an open action page says that it is outdated', () => page.locator('#changed').isVisible())
  check('an outdated action page keeps its content and the typed reason', (await text(page)).includes('Live three') && await page.locator('#reason').inputValue() === 'I am writing this')
  await page.screenshot({ path: join(out, 'changed.png') })
  await page.keyboard.press('Escape')
  await page.locator('#look').click()
  check('the new version is shown on request', (await text(page)).includes('Something else entirely'))
  // Keys lead to buttons. None decides, and none acts while a person types.
  const keyed = await play('propose', { name: 'keyed', kind: 'note', subject: 'By keys' })
  await page.goto(action(keyed) + '?group=none&sort=age')
  await page.keyboard.press('a')
  check('the key a moves to the approve button and decides nothing', await page.evaluate(() => document.activeElement?.id) === 'approve' && (await play('state', { name: 'keyed' })).state === 'pending')
  await page.keyboard.press('r')
  check('the key r opens the sheet and moves to the reason', await page.evaluate(() => document.activeElement?.id) === 'reason')
  await page.keyboard.type('jake are s/')
  check('keys are text while a person writes', await page.locator('#reason').inputValue() === 'jake are s/' && page.url().includes(keyed.id))
  await page.keyboard.press('Escape')
  await page.evaluate(() => document.activeElement.blur())
  await page.keyboard.press('s')
  check('the key s opens the sheet to put it off', await page.locator('#snooze-sheet').isVisible())
  await page.keyboard.press('Escape')
  await page.evaluate(() => document.activeElement.blur())
  await page.keyboard.press('/')
  check('the key / moves to the search', await page.evaluate(() => document.activeElement?.id) === 'q')
  await page.evaluate(() => document.activeElement.blur())
  await Promise.all([page.waitForURL((u) => !u.pathname.includes(keyed.id)), page.keyboard.press('k')])
  check('the key k opens the previous action, in the same order', new URL(page.url()).searchParams.get('sort') === 'age' && (await play('state', { name: 'keyed' })).state === 'pending', page.url())
  await page.goto(action(keyed))
  await page.keyboard.press('a')
  await Promise.all([page.waitForURL((u) => u.searchParams.get('done') === keyed.id), page.keyboard.press('Enter')])
  check('Enter on the button decides', (await play('state', { name: 'keyed' })).state !== 'pending')
  await page.goto(at('/console/batch'))
  const boxes = page.locator('input[name=act]')
  await boxes.first().check()
  await play('propose', { name: 'live4', kind: 'note', subject: 'Live four' })
  await eventually('an open batch page says that it is outdated', () => page.locator('#changed').isVisible())
  check('an outdated batch page keeps its ticks', await boxes.first().isChecked())

  // On other pages only the count changes.
  await page.goto(at('/console/keys'))
  const n = await page.title()
  await play('decide', { name: 'live4', reject: 'no' })
  await eventually('the title of every page is updated with the count', async () => /^\(\d+\)/.test(await page.title()) && await page.title() !== n)
  await context.close()
}

// shown takes the screenshots for docs/reference/console.md, if requested: the top of
// each page, before scrolling. Those in both have all four forms, the others two.
async function shown(both, pages, signedIn) {
  const dir = process.env.POSTERN_TEST_DOCS
  if (!dir) return
  mkdirSync(dir, { recursive: true })
  const [wide, narrow] = [{ width: 1280, height: 860 }, { width: 390, height: 780 }]
  const all = [...both, ...pages]
  for (const [kind, viewport, colorScheme, which] of [['wide', wide, 'light', all], ['narrow', narrow, 'dark', all], ['wide-dark', wide, 'dark', both], ['narrow-light', narrow, 'light', both]]) {
    const context = await open({ viewport, colorScheme, storageState: signedIn })
    const page = await context.newPage()
    for (const [title, path, act] of which) {
      await page.goto(at(path))
      if (act) await act(page)
      await Promise.all(page.frames().map((f) => f.waitForLoadState()))
      await page.waitForTimeout(300) // a frame is painted after it has loaded
      await page.screenshot({ path: join(dir, `${title}-${kind}.png`) })
    }
    await context.close()
  }
}

async function viewer(context) {
  const page = await context.newPage()
  await play('role', { role: 'viewer' })
  const a = await play('propose', { name: 'seen', kind: 'note', subject: 'Seen' })
  for (const path of ['/console/review', `/console/actions/${a.id}`, '/console/switches', '/console/policy', '/console/keys', '/console/webhooks', '/console/mailboxes', `/console/inboxes/${a.inbox}`]) {
    const answer = await page.goto(at(path))
    check(`a viewer sees no button: ${path.replace(a.id, 'ID').replace(a.inbox, 'INBOX')}`, answer.status() === 200 && await page.locator('main form[method=post]').count() === 0)
  }
  for (const path of ['/console/batch', '/console/policy/draft', '/console/people']) check(`a viewer is refused ${path}`, (await page.goto(at(path))).status() === 403)
  await play('role', { role: 'owner' })
  await page.close()
}

// connectMailbox connects a mailbox over IMAP and SMTP and returns the path of its page.
async function connectMailbox(page) {
  await page.goto(at('/console/mailboxes'))
  const connect = async (credential) => {
    await fill(page, { Address: 'ann@mail.example', 'IMAP server': 'imap.mail.example:993', 'SMTP server': 'smtp.mail.example:465', 'Password or access token': credential })
    await page.getByRole('button', { name: 'Connect mailbox' }).click()
  }
  await connect('wrong')
  check('a refused password connects nothing and keeps the other fields', /Nothing was connected/.test(await page.getByRole('alert').innerText()) && await page.locator('#imap').inputValue() === 'imap.mail.example:993' && await page.locator('#credential').inputValue() === '', await text(page))
  await connect('right')
  check('a connected mailbox shows the key of its inbox', /pib_/.test(await text(page)), await text(page))
  await page.goto(at('/console/mailboxes'))
  await page.getByRole('link', { name: 'ann@mail.example', exact: true }).click()
  await page.getByRole('button', { name: 'Pause' }).click()
  check('a connected mailbox is paused', (await text(page)).includes('Nothing is fetched, changed or sent'), await text(page))
  await page.getByRole('button', { name: 'Resume' }).click()
  return new URL(page.url()).pathname
}

async function run() {
  const context = await open({ acceptDownloads: true })
  const page = await context.newPage()
  await page.goto(link)
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await page.getByRole('button', { name: 'Create account' }).click()
  const signedIn = await context.storageState()
  await pictures([['queue-none', '/console/review'], ['switches-none', '/console/switches'], ['webhooks-none', '/console/webhooks']], signedIn)
  const seen = await decisions(context)
  const evil = await attacks(context)

  // A webhook and a key, so that their pages have content.
  await page.goto(at('/console/webhooks'))
  await page.locator('#name').fill('reviewers’ chat')
  await page.locator('#url').fill('https://hooks.example.com/postern')
  await page.getByLabel('oversight.pending').check()
  await page.getByRole('button', { name: 'Create webhook' }).click()
  check('a webhook’s secret is shown once', (await text(page)).includes('shown only once'))
  await page.getByRole('link', { name: 'I have copied this' }).click()
  const webhook = new URL(page.url()).pathname
  await page.goto(at('/console/keys'))
  await page.locator('#name').fill('continuous integration')
  await page.getByRole('button', { name: 'Create key' }).click()
  check('a new API key is shown once', /e2b_[0-9a-f]{40}/.test(await text(page)))
  const mailbox = await connectMailbox(page)
  await play('runs')
  const run = '/console/runs/run_' + 'A'.repeat(26)
  await pictures([
    ['queue', '/console/review'], ['runs', '/console/runs'], ['run', run], ['filtered', '/console/review?kind=inbox.mode'], ['batch', '/console/batch'], ['action', `/console/actions/${seen.report.id}`],
    ['edit', `/console/actions/${seen.report.id}/edit`], ['hostile', `/console/actions/${evil.id}`], ['asked-others', `/console/actions/${seen.legal.id}`],
    ['second-factor', `/console/actions/${seen.money.id}`], ['done', `/console/actions/${seen.large.id}`], ['inbox', seen.inbox], ['policy', '/console/policy'],
    ['draft', '/console/policy/draft', (p) => p.locator('#try').click()], ['policy-change', seen.change], ['switches', '/console/switches'], ['webhooks', '/console/webhooks'],
    ['webhook', webhook], ['keys', '/console/keys'], ['sending', '/console/sending'], ['quarantine', '/console/quarantine'], ['decided', '/console/decided'], ['audit', '/console/audit'],
    ['mailboxes', '/console/mailboxes'], ['mailbox', mailbox],
  ], signedIn)
  await play('propose', { name: 'fresh', kind: 'report' })
  const fresh = await play('state', { name: 'fresh' })
  const work = process.env.POSTERN_TEST_DOCS ? await play('work') : fresh
  await shown([
    ['overview', '/console/'], ['queue', '/console/review'], ['action', `/console/actions/${fresh.id}`], ['day', `/console/agents/${work.inbox}`],
  ], [
    ['agents', '/console/agents'], ['disk', '/console/disk'], ['notifications', '/console/account/notifications'],
    ['batch', '/console/batch'], ['edited', `/console/actions/${seen.report.id}`],
    ['hostile', `/console/actions/${evil.id}`], ['inbox', seen.inbox], ['policy', '/console/policy'], ['draft', '/console/policy/draft', (p) => p.locator('#try').click()],
    ['switches', '/console/switches'], ['webhooks', '/console/webhooks'], ['webhook', webhook], ['decided', '/console/decided'], ['done', `/console/actions/${seen.large.id}`], ['inboxes', '/console/inboxes'],
    ['quarantine', '/console/quarantine'], ['sending', '/console/sending'], ['domains', '/console/domains'], ['mailboxes', '/console/mailboxes'], ['mailbox', mailbox], ['runs', '/console/runs'], ['run', run], ['keys', '/console/keys'], ['audit', '/console/audit'], ['account', '/console/account'], ['people', '/console/people'],
  ], signedIn)
  await page.goto(at('/console/switches'))
  await page.getByRole('button', { name: /^Turn off/ }).click()
  check('an owner turns off a kill switch', (await text(page)).includes('Nothing is stopped.'))
  await live(signedIn)
  await viewer(context)
  check('the pages load nothing from another host', foreign.length === 0, foreign.join(' '))
  check('the browser logs no error', complaints.length === 0, complaints.join(' | '))
}

await finish(run)
