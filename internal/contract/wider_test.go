package contract_test

import (
	"cmp"
	"math/rand/v2"
	"net/netip"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"postern/internal/contract"
	"postern/internal/policy"
)

// TestWider has at least one case for each field. A difference must name its clause and
// its field.
func TestWider(t *testing.T) {
	const base = "commands: {allow: [{run: 'ls **'}]}\n"
	for _, test := range []struct {
		name, bound, c string
		want           string // clause and field; empty means contained
	}{
		{"same", base, base, ""},
		{"fewer", base, "", ""},
		{"narrower arguments", base, "commands: {allow: [{run: 'ls -l *'}]}", ""},
		{"program", base, "commands: {allow: [{run: 'ls **'}, {run: cat}]}", "commands commands.allow[1].run"},
		{"arguments", "commands: {allow: [{run: 'ls -l'}]}", base, "commands commands.allow[0].run"},
		{"star for text", "commands: {allow: [{run: 'ls /data/*'}]}", "commands: {allow: [{run: 'ls *'}]}", "commands commands.allow[0].run"},
		{"path for name", base, "commands: {allow: [{run: '/bin/ls **'}]}", "commands commands.allow[0].run"},
		{"any", base, "commands: {allow: [{run: '**'}]}", "commands commands.allow[0].run"},
		{"within any", "commands: {allow: [{run: '**'}]}", "commands: {allow: [{run: '/opt/x **'}, {run: ls}]}", ""},
		{"max", "commands: {allow: [{run: 'ls **', max: 2}]}", base, "commands commands.allow[0].max"},
		{"sum of max", "commands: {allow: [{run: 'ls **', max: 2}]}", "commands: {allow: [{run: 'ls -l', max: 2}, {run: 'ls -a', max: 1}]}", "commands commands.allow"},
		{"time", "commands: {allow: [{run: 'ls **', time: 2s}]}", "commands: {allow: [{run: 'ls **', time: 3s}]}", "commands commands.allow[0].time"},
		{"ask", "commands: {allow: [{run: 'ls **', ask: true}]}", base, "commands commands.allow[0].ask"},
		{"ask of an earlier pattern", "commands: {allow: [{run: 'ls -a', ask: true}, {run: 'ls **'}]}", base, "commands commands.allow[0].ask"},
		{"ask of an earlier pattern that is another", "commands: {allow: [{run: 'ls -a', ask: true}, {run: 'ls **'}]}", "commands: {allow: [{run: 'ls -l'}]}", ""},
		{"deny left out", base + "", base, ""},
		{"deny", "commands: {allow: [{run: 'ls **'}], deny: [rm]}", base, "commands commands.deny"},
		{"deny kept", "commands: {allow: [{run: 'ls **'}], deny: [rm]}", "commands: {allow: [{run: 'ls **'}], deny: [rm, cat]}", ""},
		{"deny of other arguments", "commands: {allow: [{run: 'ls **'}], deny: ['git push']}", "commands: {allow: [{run: 'ls -l'}]}", ""},
		{"deny without programs", "commands: {deny: [rm]}", "", ""},
		{"template", "", "template: other", "commands template"},
		{"template by its name", "template: base", "template: base:v1", ""},
		{"template without its tag", "template: base:v1", "", "commands template"},
		{"read", "files: {read: [/data/a]}", "files: {read: [/data]}", "files files.read[0]"},
		{"read below", "files: {read: [/data]}", "files: {read: [/data/a, /usr/share]}", ""},
		{"read beside", "files: {read: [/data]}", "files: {read: [/database]}", "files files.read[0]"},
		{"read what is written", "files: {write: [/work]}", "files: {read: [/work]}", "files files.read[0]"},
		{"write", "files: {read: [/work]}", "files: {write: [/work]}", "files files.write[0]"},
		{"hidden", "files: {read: [/data], deny: [/data/x]}", "files: {read: [/data]}", "files files.read[0]"},
		{"hidden still", "files: {read: [/data], deny: [/data/x]}", "files: {read: [/data/y]}", ""},
		{"hidden by more", "files: {read: [/data], deny: [/data/x/y]}", "files: {read: [/data], deny: [/data/x]}", ""},
		{"hidden system files", "files: {deny: [/etc/ssl]}", "", "files files.deny"},
		{"input", "", "files: {inputs: [{path: /in/a}]}", "inputs files.inputs[0].path"},
		{"input size", "files: {inputs: [{path: /in/*, size: 1KiB}]}", "files: {inputs: [{path: /in/a}]}", "inputs files.inputs[0].size"},
		{"input digest", "files: {inputs: [{path: /in/a, sha256: " + strings.Repeat("a", 64) + "}, {path: /in/*}]}", "files: {inputs: [{path: /in/*}]}", "inputs files.inputs[0].sha256"},
		{"host", "network: {allow: ['*.example.com']}", "network: {allow: [example.com]}", "network network.allow[0]"},
		{"host below", "network: {allow: ['*.example.com']}", "network: {allow: [a.example.com, '*.b.example.com']}", ""},
		{"port", "network: {allow: [example.com]}", "network: {allow: ['example.com:8443']}", "network network.allow[0]"},
		{"the web's ports by one of them", "network: {allow: ['example.com:443']}", "network: {allow: [example.com]}", "network network.allow[0]"},
		{"port of the web", "network: {allow: ['*.example.com']}", "network: {allow: ['a.example.com:443']}", ""},
		{"port below a wildcard", "network: {allow: ['*.example.com:8443']}", "network: {allow: ['a.example.com:8443']}", ""},
		{"host by address", "network: {allow: [192.0.2.0/24]}", "network: {allow: [example.com]}", "network network.allow[0]"},
		{"address", "network: {allow: [192.0.2.0/24]}", "network: {allow: [192.0.0.0/16]}", "network network.allow[0]"},
		{"the Internet", "network: {allow: ['*.example.com']}", "network: {allow: [0.0.0.0/0]}", "network network.allow"},
		{"within the Internet", "network: {allow: [0.0.0.0/0]}", "network: {allow: [example.com, 192.0.2.1]}", ""},
		{"a name around a denied address", "network: {allow: [0.0.0.0/0], deny: [192.0.2.0/24]}", "network: {allow: [example.com]}", "network network.allow[0]"},
		{"a denied address", "network: {allow: [0.0.0.0/0], deny: [192.0.2.0/24]}", "network: {allow: [192.0.2.128/25]}", "network network.allow[0]"},
		{"not denied any more", "network: {allow: [0.0.0.0/0], deny: [192.0.2.0/24]}", "network: {allow: [0.0.0.0/0], deny: [192.0.2.0/25]}", "network network.deny"},
		{"manager", "", "packages: [{manager: npm}]", "packages packages[0].manager"},
		{"pinned", "packages: [{manager: npm, pinned: true}]", "packages: [{manager: npm}]", "packages packages[0].pinned"},
		{"secret", "network: {allow: [a.com]}", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com]}]", "credentials credentials[0].hosts[0]"},
		{"secret's host", "network: {allow: ['*.a.com']}\ncredentials: [{secret: s, hosts: [b.a.com]}]", "network: {allow: ['*.a.com']}\ncredentials: [{secret: s, hosts: ['*.a.com']}]", "credentials credentials[0].hosts[0]"},
		{"secret's header", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com]}]", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com], header: X-Key}]", "credentials credentials[0].hosts[0]"},
		{"secret's approval", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com], approval: first}]", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com], approval: never}]", "credentials credentials[0].approval"},
		{"secret's stricter approval", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com], approval: never}]", "network: {allow: [a.com]}\ncredentials: [{secret: s, hosts: [a.com], header: authorization}]", ""},
		{"inbox", "", "mail: {inbox: a@example.com}", "mail mail.inbox"},
		{"another inbox", "mail: {inbox: b@example.com}", "mail: {inbox: a@example.com}", "mail mail.inbox"},
		{"mails", "mail: {inbox: a@example.com}", "mail: {inbox: a@example.com, max: 2}", "mail mail.max"},
		{"default limits", "limits: {memory: 512MiB}", "", "limits limits.memory"},
		{"time limit", "", "limits: {time: 11m}", "limits limits.time"},
		{"cpus", "", "limits: {cpus: 2.5}", "limits limits.cpus"},
		{"disk", "", "limits: {disk: 2GiB}", "limits limits.disk"},
		{"output limit", "", "limits: {output: 2MiB}", "limits limits.output"},
		{"processes", "", "limits: {processes: 513}", "limits limits.processes"},
		{"lower limits", "", "limits: {time: 1m, memory: 64MiB, cpus: 1, disk: 1MiB, output: 1KiB, processes: 8}", ""},
		{"exit", "", "on_failure: {exit: continue}", "on_failure on_failure.exit"},
		{"exit written out", "", "on_failure: {exit: stop}", ""},
		{"stderr", "", "on_failure: {stderr: 3KiB}", "on_failure on_failure.stderr"},
		{"output", "", "on_failure: {output: true}", "on_failure on_failure.output"},
		{"artifact", "files: {write: [/w]}", "files: {write: [/w]}\nartifacts: [{path: /w/a, type: csv}]", "artifacts artifacts[0].path"},
		{"artifact type", "files: {write: [/w]}\nartifacts: [{path: /w/*, type: csv}]", "files: {write: [/w]}\nartifacts: [{path: /w/a, type: any}]", "artifacts artifacts[0].type"},
		{"artifact size", "files: {write: [/w]}\nartifacts: [{path: /w/*, type: csv, size: 1KiB}]", "files: {write: [/w]}\nartifacts: [{path: /w/a, type: csv}]", "artifacts artifacts[0].size"},
		{"artifact review", "files: {write: [/w]}\nartifacts: [{path: /w/*, type: csv}]", "files: {write: [/w]}\nartifacts: [{path: /w/a, type: csv, review: flagged}]", "artifacts artifacts[0].review"},
		{"review of an earlier artifact", "files: {write: [/w]}\nartifacts: [{path: /w/a, type: csv}, {path: /w/*, type: csv, review: policy}]", "files: {write: [/w]}\nartifacts: [{path: /w/*, type: csv, review: policy}]", "artifacts artifacts[0].review"},
		{"stricter review", "files: {write: [/w]}\nartifacts: [{path: /w/**, type: any, review: policy}]", "files: {write: [/w]}\nartifacts: [{path: /w/x/*.csv, type: csv}]", ""},
		{"keep", "", "teardown: {keep: 1m}", "teardown teardown.keep"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, bound := with(t, test.c), with(t, test.bound)
			var got []string
			for _, d := range c.Wider(bound) {
				got = append(got, d.Clause+" "+d.Field)
				if !slices.ContainsFunc(c.Clauses(), func(cl contract.Clause) bool { return cl.ID == d.Clause }) || d.Text == "" {
					t.Errorf("clause %q: %s", d.Clause, d.Text)
				}
			}
			if want := strings.TrimSpace(test.want); strings.Join(got, ", ") != want {
				t.Errorf("got %v, want %q", c.Wider(bound), want)
			}
			d := contract.Diff(bound, c)
			if (len(d.Wider) > 0) != (test.want != "") || d.Same != (bound.Digest() == c.Digest()) {
				t.Errorf("diff %+v", d)
			}
		})
	}
}

// A gen generates contracts, and the starts and paths to ask them about, from a few
// words, so that many of them match.
type gen struct{ *rand.Rand }

func pick[T any](g gen, list ...T) T { return list[g.IntN(len(list))] }

func some[T any](g gen, most int, make func() T) []T {
	var out []T
	for range g.IntN(most + 1) {
		out = append(out, make())
	}
	return out
}

func (g gen) pattern() string {
	words := []string{pick(g, "a", "b", "pip", "/bin/a", "/w/a", "/w/*", "/w/**", "/w/*/b", "**")}
	if words[0] == "**" {
		return "**"
	}
	words = append(words, some(g, 3, func() string { return pick(g, "x", "y", "*", "x*", "*y", "x*y", "install", "p==1") })...)
	if g.IntN(2) == 0 {
		words = append(words, "**")
	}
	return strings.Join(words, " ")
}

func (g gen) started() contract.Started {
	p := pick(g, "/bin/a", "/usr/bin/a", "/usr/bin/a1", "/bin/b", "/w/a", "/w/b", "/w/a/b", "/w", "/usr/bin/pip", "")
	return contract.Started{
		Path: p, Name: pick(g, p, "/bin/a", "/bin/b", "a", "/w/a", ""), Dir: pick(g, "/bin", "/w"),
		Args: append(some(g, 1, func() string { return pick(g, path.Base(p), "a", "b", "-a", "/bin/b") }), some(g, 4, func() string {
			return pick(g, "x", "y", "xy", "", "xzy", "install", "p==1", "p")
		})...),
		Fixed: g.IntN(4) > 0, Cut: g.IntN(6) == 0,
	}
}

func (g gen) path() string {
	return pick(g, "/", "/w", "/w/a", "/w/a/b", "/wa", "/d", "/d/a", "/etc", "/etc/x", "/usr")
}

func (g gen) filePattern() string {
	return pick(g, "/w/a", "/w/*", "/w/**", "/w/a*", "/w/*b", "/w/*/b", "/w/a/**", "/w/a/*", "/d/**", "/**")
}

func (g gen) host() string { return pick(g, "e.com", "*.e.com", "a.e.com", "*.a.e.com", "b.a.e.com") }

func (g gen) contract() *contract.Contract {
	c := &contract.Contract{Version: 1, Name: "c"}
	c.Commands.Allow = some(g, 3, func() contract.Command {
		return contract.Command{Run: g.pattern(), Max: pick(g, 0, 0, 1, 2), Time: contract.Duration(pick(g, 0, 0, time.Second, 2*time.Second)), Ask: g.IntN(3) == 0}
	})
	if g.IntN(3) == 0 {
		c.Commands.Deny = some(g, 2, g.pattern)
	}
	c.Files.Read = some(g, 2, g.path)
	c.Files.Write = some(g, 2, g.path)
	c.Files.Deny = some(g, 1, g.path)
	c.Files.Inputs = some(g, 2, func() contract.Input {
		return contract.Input{Path: g.filePattern(), Size: pick(g, contract.Size(0), 1, 32<<20), SHA256: pick(g, "", "", "a", "b")}
	})
	c.Network.Allow = some(g, 2, func() string {
		return pick(g, g.host(), g.host()+pick(g, "", ":443", ":8443"), "0.0.0.0/0", "8.0.0.0/8", "8.8.0.0/16", "8.8.8.8", "2600::/16")
	})
	if slices.Contains(c.Network.Allow, "0.0.0.0/0") {
		c.Network.Allow = []string{"0.0.0.0/0"} // as Check has it
		c.Network.Deny = some(g, 2, func() string { return pick(g, "8.0.0.0/8", "8.8.8.0/24", "9.9.9.9") })
	}
	for _, m := range []string{"pypi", "npm"} {
		if g.IntN(2) == 0 {
			c.Packages = append(c.Packages, contract.Package{Manager: m, Pinned: g.IntN(2) == 0})
		}
	}
	c.Credentials = some(g, 2, func() contract.Credential {
		return contract.Credential{Secret: pick(g, "s", "t"), Hosts: some(g, 2, g.host), Header: pick(g, "", "X-Key"), Approval: pick(g, "", "first", "never")}
	})
	c.Artifacts = some(g, 2, func() contract.Artifact {
		return contract.Artifact{Path: g.filePattern(), Type: pick(g, "csv", "any"), Size: pick(g, contract.Size(0), 1, 32<<20), Review: pick(g, "", "flagged", "policy")}
	})
	return c
}

// bound returns a changed and extended copy of c, so that some bounds contain c.
func (g gen) bound(c *contract.Contract) *contract.Contract {
	b, more := *c, g.contract()
	mix := func(allow bool) bool { return allow && g.IntN(2) == 0 }
	b.Commands.Allow = slices.Clone(b.Commands.Allow)
	for i := range b.Commands.Allow {
		if mix(true) {
			a := &b.Commands.Allow[i]
			a.Run, a.Max, a.Time, a.Ask = cmp.Or(pick(g, "", g.pattern()), a.Run), a.Max*g.IntN(3), a.Time*contract.Duration(g.IntN(3)), a.Ask && mix(true)
		}
	}
	if mix(true) {
		b.Commands.Allow = append(more.Commands.Allow, b.Commands.Allow...)
	}
	if mix(true) {
		b.Commands.Deny = more.Commands.Deny
	}
	if mix(true) {
		b.Files.Read, b.Files.Write, b.Files.Deny = append(more.Files.Read, b.Files.Read...), append(more.Files.Write, b.Files.Write...), more.Files.Deny
	}
	if mix(true) {
		b.Files.Inputs = append(more.Files.Inputs, b.Files.Inputs...)
	}
	if mix(true) {
		b.Network = more.Network
	}
	if mix(true) {
		b.Packages = more.Packages
	}
	if mix(true) {
		b.Credentials = append(more.Credentials, b.Credentials...)
	}
	if mix(true) {
		b.Artifacts = append(more.Artifacts, b.Artifacts...)
	}
	return &b
}

// contained reports whether found has no difference in the given clauses.
func contained(found []contract.Difference, clauses ...string) bool {
	return !slices.ContainsFunc(found, func(d contract.Difference) bool { return slices.Contains(clauses, d.Clause) })
}

// TestWiderIsSound generates pairs of contracts. Where Wider finds nothing in a clause,
// the bound must allow at least as much in it as the contract.
func TestWiderIsSound(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	g := gen{rand.New(rand.NewPCG(seed, 0))}
	kept := map[string]int{}
	for range 3_000 {
		c := g.contract()
		b := g.bound(c)
		found := c.Wider(b)
		if d := c.Wider(c); len(d) > 0 {
			t.Fatalf("seed %d: wider than itself: %v\n%s", seed, d, c.Canonical())
		}
		fail := func(format string, args ...any) {
			t.Helper()
			t.Errorf(format, args...)
			t.Fatalf("seed %d\nc: %s\nb: %s", seed, c.Canonical(), b.Canonical())
		}
		if contained(found, "commands", "packages") {
			kept["commands"]++
			starts(g, c, b, fail)
		}
		if contained(found, "files") {
			kept["files"]++
			for range 10 {
				p := g.path()
				r, w := sees(c, p)
				br, bw := sees(b, p)
				if r && !br || w && !bw {
					fail("%s: reads %t, writes %t; bound %t, %t", p, r, w, br, bw)
				}
			}
		}
		if contained(found, "inputs", "artifacts") {
			kept["inputs"]++
			placedFiles(g, c, b, fail)
		}
		if contained(found, "network") {
			kept["network"]++
			connections(t, g, c, b, fail)
		}
		if contained(found, "credentials") {
			kept["credentials"]++
			for _, secret := range []string{"s", "t"} {
				for _, host := range []string{"e.com", "a.e.com", "b.a.e.com", "c.e.com"} {
					for _, header := range []string{"", "X-Key"} {
						// If several match, the strictest applies.
						mine := approval(c, secret, host, header)
						theirs := approval(b, secret, host, header)
						if len(mine) > 0 && (len(theirs) == 0 || slices.Min(mine) > slices.Min(theirs)) {
							fail("%s to %s: %v, bound %v", secret, host, mine, theirs)
						}
					}
				}
			}
		}
	}
	t.Logf("contained pairs: %v", kept)
	for _, clause := range []string{"commands", "files", "inputs", "network", "credentials"} {
		if kept[clause] < 50 {
			t.Errorf("only %d pairs are contained in %s: the test shows little", kept[clause], clause)
		}
	}
}

// starts asks both contracts about a series of starts and counts them.
func starts(g gen, c, b *contract.Contract, fail func(string, ...any)) {
	used, usedB := make([]int, len(c.Commands.Allow)), make([]int, len(b.Commands.Allow))
	for range 40 {
		s := g.started()
		m := c.Start(s)
		if !m.Allowed {
			continue
		}
		mine := c.Commands.Allow[m.Index]
		if used[m.Index]++; mine.Max > 0 && used[m.Index] > mine.Max {
			continue
		}
		mb := b.Start(s)
		if !mb.Allowed {
			fail("%+v: %s; bound %s", s, m.Why, mb.Why)
			return
		}
		theirs := b.Commands.Allow[mb.Index]
		if usedB[mb.Index]++; theirs.Max > 0 && usedB[mb.Index] > theirs.Max {
			fail("%+v: start %d of bound's %s", s, usedB[mb.Index], theirs.Run)
		}
		if mb.Ask && !m.Ask || theirs.Time > 0 && (mine.Time == 0 || mine.Time > theirs.Time) {
			fail("%+v: %+v, bound %+v", s, mine, theirs)
		}
	}
}

// sees models the view of files that Files describes.
func sees(c *contract.Contract, p string) (read, write bool) {
	in := func(dirs []string) bool {
		return slices.ContainsFunc(dirs, func(d string) bool { return p == d || d == "/" || strings.HasPrefix(p, d+"/") })
	}
	if in(c.Files.Deny) {
		return false, false
	}
	return in(c.Files.Read) || in([]string{"/usr", "/etc"}), in(c.Files.Write)
}

func placedFiles(g gen, c, b *contract.Contract, fail func(string, ...any)) {
	size := func(s contract.Size) contract.Size { return cmp.Or(s, 16<<20) }
	rank := func(r string) int { return slices.Index([]string{"", "flagged", "policy"}, r) }
	for range 20 {
		p := pick(g, "/w/a", "/w/b", "/w/ab", "/w/a/b", "/w/b/b", "/w/a/b/c", "/d/x", "/w", "/x")
		if a, ok := c.MatchArtifact(p); ok {
			o, ok := b.MatchArtifact(p)
			if !ok || size(a.Size) > size(o.Size) || o.Type != "any" && a.Type != o.Type || rank(a.Review) > rank(o.Review) {
				fail("artifact %s: %+v, bound %+v", p, a, o)
			}
		}
		if a, ok := c.MatchInput(p); ok {
			o, ok := b.MatchInput(p)
			if !ok || size(a.Size) > size(o.Size) || o.SHA256 != "" && a.SHA256 != o.SHA256 {
				fail("input %s: %+v, bound %+v", p, a, o)
			}
		}
	}
}

func connections(t *testing.T, g gen, c, b *contract.Contract, fail func(string, ...any)) {
	t.Helper()
	mine, err := policy.NewOutbound(policy.Egress{Internet: c.Egress().Internet, AllowOut: c.Egress().AllowOut, DenyOut: c.Egress().DenyOut}, policy.Ceiling{Internet: true})
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := policy.NewOutbound(policy.Egress{Internet: b.Egress().Internet, AllowOut: b.Egress().AllowOut, DenyOut: b.Egress().DenyOut}, policy.Ceiling{Internet: true})
	if err != nil {
		t.Fatal(err)
	}
	for range 20 {
		name := pick(g, "e.com", "a.e.com", "b.a.e.com", "x.b.a.e.com", "f.com")
		to := policy.Connection{Addr: netip.AddrPortFrom(netip.MustParseAddr(pick(g, "8.8.8.8", "8.8.9.9", "8.9.9.9", "9.9.9.9", "2600::1")), pick[uint16](g, 443, 80, 8443))}
		if g.IntN(2) == 0 {
			to.Names = []string{name}
		}
		if mine.Connect(to).Effect == policy.Allow && theirs.Connect(to).Effect != policy.Allow {
			fail("connect to %+v: %s", to, theirs.Connect(to).Reason)
		}
		if mine.Resolve(name).Effect == policy.Allow && theirs.Resolve(name).Effect != policy.Allow {
			fail("resolve %s: %s", name, theirs.Resolve(name).Reason)
		}
	}
}

// approval returns the ranks of all approvals that apply to a request with a secret.
func approval(c *contract.Contract, secret, host, header string) []int {
	var out []int
	for _, cred := range c.Credentials {
		if cred.Secret != secret || cred.Header != header {
			continue
		}
		for _, h := range cred.Hosts {
			if below, wild := strings.CutPrefix(h, "*"); host == h || wild && strings.HasSuffix(host, below) {
				out = append(out, slices.Index([]string{"", "first", "never"}, cred.Approval))
			}
		}
	}
	return out
}

// FuzzParse parses hostile texts. The canonical form of a text that is accepted must be
// accepted too and have the same digest, and no method may panic.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full), "/usr/bin/git\x00git\x00log")
	f.Add([]byte("version: 1\nname: a\ncommands: {allow: [{run: \"'a b' c* \\\\* **\"}]}"), "a")
	f.Add([]byte(`{"version":1,"name":"a","files":{"write":["/w"]},"artifacts":[{"path":"/w/**","type":"any"}]}`), "/w/a")
	f.Add([]byte("version: 1\nname: a\nnetwork: {allow: [0.0.0.0/0], deny: [\"::ffff:1.2.3.4/104\"]}"), "")
	f.Add([]byte("a: &a [*a]"), "")
	f.Fuzz(func(t *testing.T, text []byte, words string) {
		for _, read := range []func([]byte) (*contract.Contract, error){contract.Parse, contract.ParseBoundary} {
			c, err := read(text)
			if err != nil {
				continue
			}
			again, err := read(c.Canonical())
			if err != nil || again.Digest() != c.Digest() {
				t.Fatalf("%s: %v", c.Canonical(), err)
			}
			if d := c.Wider(c); len(d) > 0 {
				t.Fatalf("wider than itself: %v", d)
			}
			c.Warnings()
			for _, s := range c.Explain() {
				if strings.ContainsAny(s, "\n\x00") {
					t.Fatalf("%q is not one line", s)
				}
			}
			args := strings.Split(words, "\x00")
			c.Start(contract.Started{Path: args[0], Name: args[0], Args: args[1:], Fixed: true})
			c.MatchArtifact(args[0])
			c.MatchInput(args[0])
		}
	})
}

// BenchmarkStart measures what the contract adds to each start of a program.
func BenchmarkStart(b *testing.B) {
	c := parse(b, full)
	s := contract.Started{Path: "/usr/bin/git", Name: "/usr/bin/git", Args: []string{"git", "log", "--oneline"}, Fixed: true}
	for b.Loop() {
		if !c.Start(s).Allowed {
			b.Fatal("refused")
		}
	}
}
