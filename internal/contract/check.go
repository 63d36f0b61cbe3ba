package contract

import (
	"cmp"
	"fmt"
	"math"
	"net/mail"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"postern/internal/policy"
)

const (
	maxDescription = 2000
	maxFile        = Size(256 << 20)
	maxTime        = Duration(24 * time.Hour)
	minTime        = Duration(time.Second)
	maxStarts      = 1_000_000
	maxMails       = 100
)

var (
	namePattern     = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`) })
	templatePattern = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(:[A-Za-z0-9_][A-Za-z0-9._-]*)?$`)
	})
	digestPattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f]{64}$`) })
	secretPattern = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9_-]{1,64}$`) })
	inboxPattern  = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`) })
)

// Types returns the types that an artifact can have.
func Types() []string {
	return []string{"csv", "json", "text", "markdown", "html", "pdf", "png", "jpeg", "parquet", "zip", "any"}
}

// systemDirs returns the directories that every run sees, read-only.
func systemDirs() []string {
	return []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt"}
}

// kernelDirs returns the directories that belong to the kernel or to the guest. A
// contract can neither show nor hide them. The last four are used while the view of a
// run is made.
func kernelDirs() []string {
	return []string{"/proc", "/sys", "/dev", "/run", "/.postern-start", "/.inputs", "/.old", "/.cover"}
}

// inside reports whether p is dir or below it. Both must be clean.
func inside(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// insideAny returns the first of dirs that p is inside of, or "".
func insideAny(p string, dirs []string) string {
	for _, d := range dirs {
		if inside(p, d) {
			return d
		}
	}
	return ""
}

// Check returns an error that wraps [ErrInvalid] unless the contract can be enforced.
// [Problems] lists what is wrong.
func (c *Contract) Check() error {
	if found := c.check(false); len(found) > 0 {
		return found
	}
	return nil
}

// A checker collects problems.
type checker struct {
	boundary bool
	found    problems
}

func (k *checker) add(field, format string, args ...any) {
	if len(k.found) < maxProblems {
		k.found = append(k.found, Problem{Field: field, Text: fmt.Sprintf(format, args...)})
	}
}

func (c *Contract) check(boundary bool) problems {
	k := &checker{boundary: boundary}
	if c.Version != Version {
		k.add("version", "is %d; write version: %d", c.Version, Version)
	}
	if !namePattern().MatchString(c.Name) || len(c.Name) > 63 {
		k.add("name", `%q must have 1 to 63 lower-case letters, digits and single hyphens, and begin with a letter`, clip(c.Name))
	}
	if len(c.Description) > maxDescription {
		k.add("description", "has %d bytes; at most %d are allowed", len(c.Description), maxDescription)
	}
	k.template(c.Template)
	k.commands(c)
	k.files(c)
	k.inputs(c)
	k.network(c.Network)
	k.packages(c.Packages)
	k.credentials(c)
	k.mail(c.Mail)
	k.limits(c)
	k.artifacts(c)
	k.time("teardown.keep", c.Teardown.Keep)
	if len(k.found) == 0 {
		// Report now what the wall would refuse only when the sandbox is created.
		if err := c.Egress().Validate(); err != nil && !boundary {
			k.add("network", "%s", strings.TrimPrefix(err.Error(), policy.ErrInvalid.Error()+": "))
		}
	}
	return k.found
}

// list checks the length of a list, for contracts that were not parsed.
func (k *checker) list(field string, n int) {
	if n > maxEntries {
		k.add(field, "has %d entries; at most %d are allowed", n, maxEntries)
	}
}

func (k *checker) time(field string, d Duration) {
	switch {
	case d != 0 && d < minTime:
		k.add(field, "is %s; at least 1s is allowed", d)
	case d > maxTime:
		k.add(field, "is %s; at most 24h is allowed", d)
	}
}

func (k *checker) size(field string, s, least, most Size) {
	if s != 0 && (s < least || s > most) {
		k.add(field, "is %s; %s to %s are allowed", s, least, most)
	}
}

func (k *checker) template(t string) {
	name, digest, ok := strings.Cut(t, "@")
	switch {
	case t == "" || t == "*" && k.boundary:
	case t == "*":
		k.add("template", `"*" (any template) is allowed in boundaries only; name a template`)
	case len(t) > 200 || !templatePattern().MatchString(name):
		k.add("template", "%q is not a template: write NAME, NAME:TAG or NAME@sha256: and 64 hexadecimal digits", clip(t))
	case ok && strings.Contains(name, ":"):
		k.add("template", "has a tag and a digest; write only one of them")
	case ok && !digestPattern().MatchString(strings.TrimPrefix(digest, "sha256:")), ok && !strings.HasPrefix(digest, "sha256:"):
		k.add("template", "%q: a digest is sha256: and 64 lower-case hexadecimal digits; postern template list shows them", clip("@"+digest))
	}
}

func (k *checker) commands(c *Contract) {
	k.list("commands.allow", len(c.Commands.Allow))
	k.list("commands.deny", len(c.Commands.Deny))
	seen := map[string]int{}
	for i, a := range c.Commands.Allow {
		field := fmt.Sprintf("commands.allow[%d]", i)
		p, err := newPattern(a.Run)
		if err != nil {
			k.add(field+".run", "%v", err)
			continue
		}
		if p.name == "" && !p.any {
			k.program(field+".run", p.path)
		}
		if why := c.neverRuns(p); why != "" && !k.boundary {
			k.add(field+".run", "can never run: %s", why)
		}
		words, _ := split(a.Run)
		key := strings.Join(words, "\x01")
		if first, ok := seen[key]; ok {
			k.add(field+".run", "repeats commands.allow[%d], which comes first and applies; remove one", first)
		}
		seen[key] = i
		if a.Max < 0 || a.Max > maxStarts {
			k.add(field+".max", "is %d; 0 (any number) to %d are allowed", a.Max, maxStarts)
		}
		k.time(field+".time", a.Time)
	}
	for i, d := range c.Commands.Deny {
		p, err := newPattern(d)
		field := fmt.Sprintf("commands.deny[%d]", i)
		switch {
		case err != nil:
			k.add(field, "%v", err)
		case p.any:
			k.add(field, "denies every program; leave commands.allow empty instead")
		}
	}
}

// program rejects absolute paths at which no run can have a program.
func (k *checker) program(field string, t tree) {
	for _, d := range kernelDirs() {
		if t.under(d) {
			k.add(field, "is below %s, where paths change while the run goes on; write the program's path in the template", d)
		}
	}
}

// plainPath checks a path that is to be mounted, and reports whether it can be.
func (k *checker) plainPath(field, p string) bool {
	if strings.Contains(p, "*") {
		k.add(field, `%q: patterns cannot be mounted; write the directory`, clip(p))
		return false
	}
	if _, err := patternPath(p); err != nil {
		k.add(field, "%v", err)
		return false
	}
	if d := insideAny(p, kernelDirs()); d != "" {
		k.add(field, "is in %s, which belongs to the kernel or the guest; remove it", d)
		return false
	}
	if p == "/" && !k.boundary {
		k.add(field, `"/" includes the guest's files; name the directories`)
		return false
	}
	return true
}

func (k *checker) files(c *Contract) {
	f := c.Files
	k.list("files.read", len(f.Read))
	k.list("files.write", len(f.Write))
	k.list("files.deny", len(f.Deny))
	twice := func(field, p string, list []string, i int) {
		if at := slices.Index(list[:i], p); at >= 0 {
			k.add(fmt.Sprintf("%s[%d]", field, i), "repeats %s[%d]; remove one", field, at)
		}
	}
	for i, p := range f.Read {
		k.plainPath(fmt.Sprintf("files.read[%d]", i), p)
		twice("files.read", p, f.Read, i)
	}
	for i, p := range f.Write {
		field := fmt.Sprintf("files.write[%d]", i)
		twice("files.write", p, f.Write, i)
		if !k.plainPath(field, p) {
			continue
		}
		if d := insideAny(p, systemDirs()); d != "" {
			k.add(field, "is in %s, which is read-only for every run; choose a directory such as /work", d)
		}
		if at := slices.Index(f.Read, p); at >= 0 && !k.boundary {
			k.add(field, "is also files.read[%d]; a writable directory is initially empty, so name it only once", at)
		}
	}
	for i, p := range f.Deny {
		field := fmt.Sprintf("files.deny[%d]", i)
		twice("files.deny", p, f.Deny, i)
		if !k.plainPath(field, p) {
			continue
		}
		for j, w := range f.Write {
			if !k.boundary && (inside(p, w) || inside(w, p)) {
				k.add(field, "overlaps files.write[%d], which is initially empty and the run's own; remove one", j)
			}
		}
		for j, r := range f.Read {
			if inside(r, p) {
				k.add(field, "hides all of files.read[%d]; remove one", j)
			}
		}
		if slices.Contains([]string{"/", "/usr", "/bin", "/lib", "/lib64", "/etc"}, p) {
			k.add(field, "hides files that every program needs; name paths below it")
		}
	}
	if f.Dir == "" || !k.plainPath("files.dir", f.Dir) && f.Dir != "/" {
		return
	}
	if f.Dir != "/" && insideAny(f.Dir, f.Write) == "" && insideAny(f.Dir, f.Read) == "" && insideAny(f.Dir, systemDirs()) == "" {
		k.add("files.dir", "is not in files.read or files.write; add it, or remove dir")
	}
	if at := slices.IndexFunc(f.Deny, func(d string) bool { return inside(f.Dir, d) }); at >= 0 {
		k.add("files.dir", "is hidden by files.deny[%d]", at)
	}
}

func (k *checker) inputs(c *Contract) {
	k.list("files.inputs", len(c.Files.Inputs))
	for i, in := range c.Files.Inputs {
		field := fmt.Sprintf("files.inputs[%d]", i)
		k.size(field+".size", in.Size, 1, maxFile)
		if in.SHA256 != "" && !digestPattern().MatchString(in.SHA256) {
			k.add(field+".sha256", "must be 64 lower-case hexadecimal digits; sha256sum FILE prints them")
		}
		t, err := patternPath(in.Path)
		if err != nil {
			k.add(field+".path", "%v", err)
			continue
		}
		if in.SHA256 != "" && !t.literal() {
			k.add(field+".sha256", "needs the path of one file, not a pattern")
		}
		for _, d := range append(kernelDirs(), systemDirs()...) {
			if t.under(d) {
				k.add(field+".path", "is in %s, which cannot hold inputs; choose a directory such as /work/in", d)
			}
		}
		if len(t.names) == 0 && !k.boundary || len(t.names) > 0 && len(t.names[0]) > 1 {
			k.add(field+".path", "must begin with the name of a directory")
		}
		for j, d := range c.Files.Deny {
			if t.under(d) {
				k.add(field+".path", "is hidden by files.deny[%d]; remove one", j)
			}
		}
		for j, other := range c.Files.Inputs[:i] {
			if other.Path == in.Path {
				k.add(field+".path", "repeats files.inputs[%d], which comes first and applies; remove one", j)
			}
		}
	}
}

func (k *checker) network(n Network) {
	k.list("network.allow", len(n.Allow))
	k.list("network.deny", len(n.Deny))
	open := n.parse().internet
	for i, s := range n.Allow {
		field := fmt.Sprintf("network.allow[%d]", i)
		if _, ok := parsePrefix(s); ok {
			continue
		}
		if s == "*" {
			k.add(field, `"*" is not a host; write "0.0.0.0/0" for the whole Internet`)
			continue
		}
		if _, err := policy.ParseHostPattern(s); err != nil {
			host, port, named := strings.Cut(s, ":")
			if _, bad := parseHost(host); bad == nil && named && !strings.Contains(s, "/") {
				k.add(field, "%q: the port %q must be a number from 1 to 65535", clip(s), clip(port))
				continue
			}
			k.add(field, `%q must be a host, "*." and a host, an address or a prefix, without scheme and path; a host may have a port, such as db.example.com:5432`, clip(s))
			continue
		}
		if open && !k.boundary {
			k.add(field, "has no effect beside 0.0.0.0/0; remove one")
		}
	}
	for i, s := range n.Deny {
		field := fmt.Sprintf("network.deny[%d]", i)
		p, ok := parsePrefix(s)
		switch {
		case !ok:
			k.add(field, "%q must be an address or a prefix: a denied name could be reached by another name", clip(s))
		case p.Bits() == 0 && p.Addr().Is4():
			k.add(field, "denies everything; leave network.allow empty instead")
		}
	}
	if len(n.Deny) > 0 && !open {
		k.add("network.deny", "has an effect only beside 0.0.0.0/0 in network.allow: otherwise the run reaches only what allow names; remove deny")
	}
}

func (k *checker) packages(list []Package) {
	seen := map[string]int{}
	for i, p := range list {
		field := fmt.Sprintf("packages[%d]", i)
		at := slices.IndexFunc(managers(), func(m manager) bool { return m.registry == p.Manager })
		if at < 0 || !slices.Contains(policy.RegistryNames(), p.Manager) {
			k.add(field+".manager", "%q must be one of %s", clip(p.Manager), strings.Join(policy.RegistryNames(), ", "))
			continue
		}
		if first, ok := seen[p.Manager]; ok {
			k.add(field+".manager", "repeats packages[%d]; remove one", first)
		}
		seen[p.Manager] = i
		if p.Pinned && managers()[at].exact == nil {
			k.add(field+".pinned", "cannot be enforced for %s, which resolves versions by its index; install in a template and name its digest", p.Manager)
		}
	}
}

func (k *checker) credentials(c *Contract) {
	k.list("credentials", len(c.Credentials))
	n := c.Network.parse()
	type at struct{ host, header string }
	seen := map[at]string{}
	for i, cred := range c.Credentials {
		field := fmt.Sprintf("credentials[%d]", i)
		if !secretPattern().MatchString(cred.Secret) && (cred.Secret != "*" || !k.boundary) {
			k.add(field+".secret", "%q must be the name of a secret: 1 to 64 lower-case letters, digits, _ and -; postern secret list shows the names", clip(cred.Secret))
		}
		if !slices.Contains([]string{"", "always", "first", "never"}, cred.Approval) {
			k.add(field+".approval", "%q must be always, first or never", clip(cred.Approval))
		}
		rule := policy.Egress{Rules: map[string][]policy.Rule{"example.com": {{Headers: map[string]string{cred.header(): "x"}}}}}
		if err := rule.Validate(); err != nil {
			k.add(field+".header", "%q cannot carry a secret: it is not a header name, or it controls the connection", clip(cred.Header))
		}
		if len(cred.Hosts) == 0 {
			k.add(field+".hosts", "is empty; name the hosts that get the secret")
		}
		k.list(field+".hosts", len(cred.Hosts))
		for j, h := range cred.Hosts {
			host := fmt.Sprintf("%s.hosts[%d]", field, j)
			name, err := parseHost(h)
			if err != nil {
				k.add(host, `%q must be a host name or "*." and a host name`, clip(h))
				continue
			}
			if name[0] == '.' && !strings.Contains(name[1:], ".") {
				k.add(host, "%q is a whole top-level domain; name hosts below it", clip(h))
			}
			if !n.name(name) {
				k.add(host, "%s is not in network.allow, so no request could carry the secret; add it there or remove it", clip(h))
			}
			key := at{name, cred.header()}
			if other, ok := seen[key]; ok && !k.boundary {
				k.add(host, "%s already gets %s from %s; a header has only one value", clip(h), cred.header(), other)
			}
			seen[key] = field
		}
	}
}

func (k *checker) mail(m Mail) {
	switch {
	case m.Inbox == "" && m.Max != 0:
		k.add("mail.max", "has no effect without mail.inbox; name the inbox, or remove mail")
	case m.Max < 0 || m.Max > maxMails:
		k.add("mail.max", "is %d; 1 to %d are allowed", m.Max, maxMails)
	}
	if m.Inbox == "" || m.Inbox == "*" && k.boundary || inboxPattern().MatchString(m.Inbox) {
		return
	}
	if a, err := mail.ParseAddress(m.Inbox); err != nil || a.Address != m.Inbox || len(m.Inbox) > 254 {
		k.add("mail.inbox", "%q must be the ID or the address of an inbox; postern inbox list shows them", clip(m.Inbox))
	}
}

func (k *checker) limits(c *Contract) {
	l := c.Limits
	k.time("limits.time", l.Time)
	k.size("limits.memory", l.Memory, 64<<20, 1<<40)
	k.size("limits.disk", l.Disk, 1<<20, 1<<40)
	k.size("limits.output", l.Output, 1<<10, 256<<20)
	if thousandths := l.CPUs * 1000; l.CPUs != 0 && !(l.CPUs >= 0.1 && l.CPUs <= 256) || math.Abs(thousandths-math.Round(thousandths)) > 1e-6 {
		k.add("limits.cpus", "is %g; 0.1 to 256 are allowed, in steps of 0.001", l.CPUs)
	}
	if l.Processes != 0 && (l.Processes < 8 || l.Processes > 32768) {
		k.add("limits.processes", "is %d; 8 to 32768 are allowed: the sandbox itself needs some", l.Processes)
	}
	if !slices.Contains([]string{"", "stop", "continue"}, c.OnFailure.Exit) {
		k.add("on_failure.exit", "%q must be stop or continue", clip(c.OnFailure.Exit))
	}
	k.size("on_failure.stderr", c.OnFailure.Stderr, 1, 64<<10)
}

func (k *checker) artifacts(c *Contract) {
	k.list("artifacts", len(c.Artifacts))
	for i, a := range c.Artifacts {
		field := fmt.Sprintf("artifacts[%d]", i)
		k.size(field+".size", a.Size, 1, maxFile)
		if !slices.Contains(Types(), a.Type) {
			k.add(field+".type", "%q must be one of %s", clip(a.Type), strings.Join(Types(), ", "))
		}
		if !slices.Contains([]string{"", "person", "flagged", "policy"}, a.Review) {
			k.add(field+".review", "%q must be person, flagged or policy", clip(a.Review))
		}
		t, err := patternPath(a.Path)
		if err != nil {
			k.add(field+".path", "%v", err)
			continue
		}
		if !slices.ContainsFunc(c.Files.Write, t.under) {
			k.add(field+".path", "is not below files.write, so the run could not write it; add %s there, or correct the path", path.Dir(strings.TrimSuffix(cmp.Or(a.Path, "/"), "/**")))
		}
		for j, other := range c.Artifacts[:i] {
			if other.Path == a.Path {
				k.add(field+".path", "repeats artifacts[%d], which comes first and applies; remove one", j)
			}
		}
	}
}
