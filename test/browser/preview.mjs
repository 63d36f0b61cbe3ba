// Tests the previews of files, and of threads, in a real browser, with and without JavaScript:
//
//   node preview.mjs BASE_URL SETUP_LINK OUT_DIR ACTION CODE
//
// ACTION waits, and has a file of each kind, each of which tries to run, to fetch or to
// lead away. CODE is that of a context grant for the person. It prints a line for each
// check and exits with status 0 if all passed.
import { base, check, complaints, fill, finish, foreign, link, name, open, out, password, rest } from './kit.mjs'
import { join } from 'node:path'

const [action, code] = rest
const at = (path) => new URL(path, base).href

// harmless checks that nothing of a file has run or fetched.
async function harmless(what, page) {
  const dialogs = page.dialogs ?? []
  const title = await page.title()
  check(`${what}: nothing runs, and nothing is fetched from elsewhere`, title !== 'owned' && dialogs.length === 0 && foreign.length === 0, JSON.stringify([title, dialogs, foreign]))
}

// look visits everything that shows a file.
async function look(context, what) {
  const page = await context.newPage()
  page.dialogs = []
  page.on('dialog', (d) => { page.dialogs.push(d.message()); d.dismiss() })
  await page.goto(at(`/console/actions/${action}`))
  const files = page.locator('article.att')
  const n = await files.count()
  check(`${what}: each file has a preview`, n === 8, n)
  for (const img of await page.locator('article.att img').all()) {
    await img.scrollIntoViewIfNeeded()
    await img.evaluate((e) => e.decode()).catch(() => {})
    check(`${what}: a picture is drawn`, await img.evaluate((e) => e.naturalWidth) === 300)
  }
  for (const frame of await page.locator('article.att iframe').all()) {
    await frame.scrollIntoViewIfNeeded()
    check(`${what}: HTML is in a frame without rights`, await frame.getAttribute('sandbox') === '')
  }
  const inner = page.frameLocator('#file-4 iframe')
  await inner.getByRole('heading', { name: 'Hello' }).waitFor({ timeout: 60_000 }).catch(() => {}) // the frame is loaded when it is scrolled to
  check(`${what}: HTML is shown`, await inner.getByRole('heading', { name: 'Hello' }).isVisible())
  check(`${what}: it has no script and no picture`, await inner.locator('script, img').count() === 0)
  await harmless(`${what}, the page`, page)
  const views = await page.locator('article.att .under a').evaluateAll((list) => list.map((a) => a.getAttribute('href')).filter((h) => h.includes('/view')))
  const pictures = await page.locator('article.att img').evaluateAll((list) => list.map((i) => i.getAttribute('src')))
  const frames = await page.locator('article.att iframe').evaluateAll((list) => list.map((i) => i.getAttribute('src')))
  check(`${what}: each file has a page`, views.length === n, views.length)
  const visit = async (path) => {
    await page.goto(at(path))
    await harmless(`${what}, ${path.replace(/^.*files/, 'files').replace(/\?.*/, '')}`, page)
  }
  for (const path of [...views, ...frames]) await visit(path)
  // A picture alone is a page of the browser's own, which our policy gives neither a style
  // nor an origin: the browser complains about that, sometimes late.
  const before = complaints.length
  for (const path of pictures) await visit(path)
  await page.waitForTimeout(1000)
  complaints.splice(before)
  await page.close()
}

async function shots(context, label) {
  const page = await context.newPage()
  await page.goto(at(`/console/actions/${action}`))
  for (const img of await page.locator('article.att img').all()) await img.scrollIntoViewIfNeeded()
  await page.waitForTimeout(500)
  check(`${label}: the page is not wider than the window`, await page.evaluate(() => document.documentElement.scrollWidth <= window.innerWidth))
  await page.screenshot({ path: join(out, `files-${label}.png`), fullPage: true })
  await page.goto(at('/console/account/context'))
  await page.screenshot({ path: join(out, `context-${label}.png`), fullPage: true })
  await page.close()
}

async function run() {
  const context = await open()
  const page = await context.newPage()
  await page.goto(link)
  await fill(page, { Name: name, Password: password, 'Repeat password': password })
  await page.getByRole('button', { name: 'Create account' }).click()

  await page.goto(at(`/console/actions/${action}`))
  check('without a grant the page says why there is no thread', /The inbox is sealed/.test(await page.locator('main').innerText()))
  await page.getByRole('link', { name: 'How to get a grant' }).click()
  await page.locator('#code').fill(code)
  await page.getByRole('button', { name: 'Redeem in this browser' }).click()
  check('the code is redeemed in this browser', /this browser/.test(await page.locator('main').innerText()))
  await page.goto(at(`/console/actions/${action}`))
  check('the thread is shown as text', (await page.locator('ol.thread').innerText()).includes('<script>'))
  check('no script can read the browser\'s key', !(await page.evaluate(() => document.cookie)).includes('postern_device'))

  await look(context, 'without JavaScript')
  const scripted = await open({ javaScriptEnabled: true, storageState: await context.storageState() })
  await look(scripted, 'with JavaScript')
  for (const [label, options] of [
    ['wide', { viewport: { width: 1440, height: 900 }, colorScheme: 'light' }],
    ['narrow', { viewport: { width: 390, height: 844 }, colorScheme: 'dark' }],
  ]) await shots(await open({ ...options, storageState: await context.storageState() }), label)
  // Another browser has the session, and not the key.
  const other = await open({ storageState: await context.storageState() })
  await other.clearCookies({ name: 'postern_device' })
  const there = await other.newPage()
  await there.goto(at(`/console/actions/${action}`))
  check('another browser shows no thread', /in another browser/.test(await there.locator('main').innerText()) && await there.locator('ol.thread').count() === 0)
  check('the browser complains about nothing', complaints.length === 0, complaints.join('\n'))
}

await finish(run)
