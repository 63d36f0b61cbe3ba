// Helpers for the browser tests of the console: Chromium without JavaScript, a
// record of requests to other hosts, and screenshots, wide and narrow, light and
// dark.
import { chromium } from 'playwright-core'
import { mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const [base, link, out, ...rest] = process.argv.slice(2)
if (!base || !link || !out) {
  console.error(`usage: node ${process.argv[1]} BASE_URL SETUP_LINK OUT_DIR`)
  process.exit(2)
}
mkdirSync(out, { recursive: true })
export { base, link, out, rest }

let passed = 0
let failed = 0
export function check(what, ok, detail) {
  ok ? passed++ : failed++
  console.log(`${ok ? 'ok  ' : 'FAIL'} ${what}${ok || detail === undefined ? '' : `: ${String(detail).slice(0, 500)}`}`)
  return ok
}

export const name = process.env.CONSOLE_NAME || 'ann'
export const password = 'correct horse battery staple'
const every = [
  { name: 'wide-light', viewport: { width: 1280, height: 900 }, colorScheme: 'light' },
  { name: 'wide-dark', viewport: { width: 1280, height: 900 }, colorScheme: 'dark' },
  { name: 'narrow-light', viewport: { width: 360, height: 800 }, colorScheme: 'light' },
  { name: 'narrow-dark', viewport: { width: 360, height: 800 }, colorScheme: 'dark' },
]

// Two variants are enough where the screenshots are not kept.
const variants = process.env.POSTERN_TEST_SCREENSHOTS ? every : [every[0], every[3]]

const home = mkdtempSync(join(tmpdir(), 'postern-browser-')) // nothing of the browser's stays
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM || '/usr/bin/chromium',
  headless: true,
  timeout: 180_000,
  env: { ...process.env, HOME: home },
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
})
// A hanging page must not hang the test.
const watchdog = setTimeout(() => {
  console.log('FAIL the test took too long')
  process.exit(1)
}, process.env.POSTERN_TEST_ACCESS === 'all' ? 1_700_000 : 720_000)

export const foreign = [] // requests that left for somewhere else
export const complaints = [] // of the browser: policy violations, unknown markup
function watch(context) {
  context.setDefaultTimeout(120_000)
  context.on('request', (r) => {
    if (new URL(r.url()).origin !== new URL(base).origin) foreign.push(r.url())
  })
  context.on('console', (m) => {
    if (m.type() === 'error' && !/status of 4\d\d/.test(m.text())) complaints.push(m.text())
  })
  return context
}
export async function open(options = {}) {
  const context = watch(await browser.newContext({ javaScriptEnabled: false, viewport: { width: 1280, height: 900 }, ...options }))
  context.on('page', whole)
  context.on('page', patient)
  return context
}

// patient makes a page go to an address again if the page that it shows was just loading
// itself anew: without JavaScript some do so every few seconds. It also takes a picture
// again if Chromium had none to give, as happens on a busy machine.
function patient(page) {
  for (const [name, passing] of [['goto', /interrupted by another navigation/], ['screenshot', /Unable to capture screenshot/]]) {
    const once = page[name].bind(page)
    page[name] = async (...args) => {
      for (let tries = 0; ; tries++) {
        try {
          return await once(...args)
        } catch (e) {
          if (tries === 3 || !passing.test(e.message)) throw e
          await page.waitForTimeout(500)
        }
      }
    }
  }
}

// whole makes clicks wait until the next page has loaded completely. By default a
// click returns at the first bytes of that page, and what a test counts then
// depends on how the response was split.
function whole(page) {
  const locator = Object.getPrototypeOf(page.locator('html'))
  if (locator.whole) return
  const click = locator.click
  locator.whole = true
  locator.click = async function (...args) {
    await click.apply(this, args)
    await this.page().waitForLoadState()
  }
}

// visit opens the pages in every variant with the session in state, saves their
// screenshots and checks that none is wider than the screen.
export async function pictures(pages, state) {
  const tooWide = []
  for (const v of variants) {
    const context = await open({ viewport: v.viewport, colorScheme: v.colorScheme, storageState: state })
    const page = await context.newPage()
    for (const [title, path, act] of pages) {
      await page.goto(new URL(path, base).href)
      if (act) await act(page)
      await page.screenshot({ path: join(out, `${title}-${v.name}.png`), fullPage: true })
      const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)
      if (over > 0) tooWide.push(`${title} ${v.name} by ${over}px`)
    }
    await context.close()
  }
  check(`no page is wider than its screen: ${pages.map((p) => p[0]).join(', ')}`, tooWide.length === 0, tooWide.join(', '))
}

// kindOf is a path without what tells one page of its kind from another.
const kindOf = (path) => path.split(/[?#]/)[0].replace(/\/(?:[a-z]+_[A-Z2-7a-z0-9]{2,}|i[a-z0-9]{15,}|[0-9]+|[^/]*[.@][^/]*)(?=\/|$)/g, '/*')

// walk follows the links of the console from these paths without JavaScript, and returns
// the paths that it reached: at most a few of each kind, since a project may have thousands.
export async function walk(state, paths, most = 2) {
  const context = await open({ storageState: state })
  const page = await context.newPage()
  const seen = new Map()
  const queue = [...paths]
  const reached = []
  while (queue.length > 0) {
    const path = queue.shift()
    const kind = kindOf(path)
    const before = seen.get(kind) || []
    if (before.includes(path.split('#')[0]) || before.length >= (kind === '/console/actions/*' ? 5 : most)) continue
    seen.set(kind, [...before, path.split('#')[0]])
    const answer = await page.request.get(new URL(path, base).href) // a download opens no page
    if (!/text\/html/.test(answer.headers()['content-type'] || '') || /attachment/.test(answer.headers()['content-disposition'] || '')) continue
    if (/\/frame$|\/files\//.test(path)) continue // a document of somebody else's, in a frame
    await page.goto(new URL(path, base).href)
    reached.push(path)
    const links = await page.evaluate(() => [...document.querySelectorAll('a[href]')].map((a) => a.href))
    for (const href of links) {
      const u = new URL(href)
      if (u.origin === new URL(base).origin && u.pathname.startsWith('/console/')) queue.push(u.pathname + u.search)
    }
  }
  await context.close()
  return reached
}

const axe = readFileSync(createRequire(import.meta.url).resolve('axe-core/axe.min.js'), 'utf8')

// rules returns what axe-core finds against WCAG 2.2 AA. It is put in by the debugger, so
// the page's policy stays as it is, and nothing of it is shipped.
async function rules(page, only) {
  await page.evaluate(axe)
  const found = await page.evaluate((only) => axe.run(document, {
    runOnly: only ? { type: 'rule', values: only } : { type: 'tag', values: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'] },
    iframes: false, resultTypes: ['violations'],
  }), only)
  return found.violations.map((v) => `${v.id}: ${v.nodes.slice(0, 3).map((n) => `${n.target.join(' ')} (${n.any.concat(n.all, n.none).map((c) => c.message).join('; ').slice(0, 160)})`).join(', ')}${v.nodes.length > 3 ? ` and ${v.nodes.length - 3} more` : ''}`)
}

// shot keeps a picture of a page in OUT_DIR if the pictures are asked for.
async function shot(page, what, path, form) {
  if (!process.env.POSTERN_TEST_SCREENSHOTS) return
  const name = what.replace(/^an? /, '').replace(/\W+/g, '-') + '-' + (path.replace(/^\/console\/?/, '').replace(/[^a-zA-Z0-9]+/g, '-').slice(0, 60) || 'overview')
  await page.screenshot({ path: join(out, `${name}-${form}.png`), fullPage: true })
}

// sound checks each page with axe-core, wide and narrow, light and dark, and that no page
// is wider than a screen of 390 pixels. Order and names do not depend on the colours, so
// the second scheme of each width is checked for contrast alone.
export async function sound(what, paths, state) {
  const wrong = new Map() // by what is wrong, since most is wrong on each page
  const note = (problem, where) => wrong.set(problem, [...(wrong.get(problem) || []), where])
  const context = await open({ javaScriptEnabled: true, storageState: state })
  const page = await context.newPage()
  for (const path of paths) {
    for (const [size, viewport, first, second] of [['wide', { width: 1440, height: 900 }, 'light', 'dark'], ['narrow', { width: 390, height: 844 }, 'dark', 'light']]) {
      await page.setViewportSize(viewport)
      await page.emulateMedia({ colorScheme: first, reducedMotion: 'reduce' })
      await page.goto(new URL(path, base).href)
      for (const v of await rules(page)) note(v, `${path} ${size} ${first}`)
      await shot(page, what, path, `${size}-${first}`)
      await page.emulateMedia({ colorScheme: second, reducedMotion: 'reduce' })
      await shot(page, what, path, `${size}-${second}`)
      for (const v of await rules(page, ['color-contrast'])) note(v, `${path} ${size} ${second}`)
      const over = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth)
      if (over > 0) note(`wider than the screen`, `${path} ${size} by ${over}px: ${await page.evaluate(() => [...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest('.scroll, .code, .tabs')).slice(0, 3).map((e) => e.tagName + '.' + e.className).join(' '))}`)
    }
  }
  await context.close()
  for (const [problem, where] of wrong) check(`${what}: ${problem}`, false, `${where.length} times: ${where.slice(0, 4).join(', ')}`)
  check(`${what}: axe-core finds nothing on ${paths.length} pages, and none is too wide`, wrong.size === 0)
}

// tabTo presses Tab until the element with this id has the focus.
export async function tabTo(page, id, most = 60) {
  for (let i = 1; i <= most; i++) {
    await page.keyboard.press('Tab')
    if (await page.evaluate((id) => document.activeElement?.id === id, id)) return i
  }
  return 0
}

export async function fill(page, fields) {
  for (const [label, value] of Object.entries(fields)) await page.getByLabel(label, { exact: true }).fill(value)
}

// finish runs a test and exits with status 0 if all checks passed.
export async function finish(run) {
  try {
    await run()
  } catch (err) {
    check('the test runs to its end', false, err.stack)
  } finally {
    await browser.close()
    rmSync(home, { recursive: true, force: true, maxRetries: 5 })
    clearTimeout(watchdog)
  }
  console.log(`${passed} passed, ${failed} failed`)
  process.exit(failed === 0 ? 0 : 1)
}
