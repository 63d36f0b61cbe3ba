package verification

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/client"
)

// Public addresses that no sandbox may reach. They belong to public DNS resolvers, which
// answer, so that only the wall can be the reason for silence.
const (
	publicHost  = "1.1.1.1"
	publicHost2 = "9.9.9.9"
	publicHost6 = "2606:4700:4700::1111"
)

// An endpoint is an address and a port, as the probe takes them.
type endpoint [2]any

// table returns all checks. To add one, add its row here, and a world in which it fails to
// holes in the tests.
func table() []*Check {
	const short, long = time.Minute, 3 * time.Minute
	return []*Check{
		{
			ID: "files.guest", Group: Files, limit: short,
			Tried: "read the guest's memory, files and environment, also as root", Expected: "access denied; its own memory is readable",
			Wants: []Want{control("its own memory"), hidden("the guest's environment"), hidden("the guest's memory"), hidden("the guest's open files"), hidden("the guest's program through /proc"), hidden("the guest's root directory")},
			try:   inside(guestJobs("1")...),
		},
		{
			ID: "files.host", Group: Files, limit: short,
			Tried: "look for files of the server and of the host", Expected: "none found",
			Wants: []Want{control("a file of its own"), absent("the server's files"), absent("the host's kernel log and disks"), absent("the host's processes")},
			try:   tryHostFiles,
		},
		{
			ID: "files.others", Group: Files, limit: short,
			Tried: "look for files that another sandbox wrote", Expected: "none found",
			Wants: []Want{control("the write in the other sandbox"), absent("the other sandbox's files")},
			try:   tryOtherFiles,
		},
		{
			ID: "files.kernel", Group: Files, limit: short,
			Tried: "mount proc, open devices, trace the guest, load a kernel module", Expected: "all refused, also as root",
			Wants: []Want{control("its own directory"), refused("mount a file system"), noWay("open a device that it made"), noWay("trace the guest"), refused("load a kernel module")},
			try:   inside(kernelJobs("1")...),
		},

		{
			ID: "egress.tcp", Group: Egress, limit: short,
			Tried: "connect by TCP to public addresses", Expected: "no byte of a peer's within 5 s, and each refusal recorded in the audit",
			Wants: slices.Concat([]Want{control("a server in the sandbox")}, noWayTo(publicTCP()...)),
			try:   recorded(publicTCP(), job{What: "a server in the sandbox", Kind: "loopback", Targets: []string{""}}),
		},
		{
			ID: "egress.private", Group: Egress, limit: short,
			Tried: "connect by TCP to private networks", Expected: "no byte of a peer's within 5 s, and each refusal recorded in the audit",
			Wants: noWayTo(privateTCP()...),
			try:   recorded(privateTCP()),
		},
		{
			ID: "egress.opened", Group: Egress, limit: short,
			Tried: "reach what --egress-allow lists, and what is next to it", Expected: "nothing but what is listed is reached",
			Wants: []Want{noWay("addresses on it").unless(opening{list: true}), noWay("hosts on it").unless(opening{list: true}), noWay("names next to it").unless(opening{every: true}), noWay("other ports of it").unless(opening{every: true})},
			try:   tryOpened,
		},
		{
			ID: "egress.udp", Group: Egress, limit: short,
			Tried: "send UDP to public addresses", Expected: "no answer within 5 s, and recorded in the audit",
			Wants: []Want{noWay("UDP to a public address"), control(refusalOf(publicHost + ":123"))},
			try: recorded([]destination{{at: netip.MustParseAddrPort(publicHost + ":123"), quiet: true}},
				job{What: "UDP to a public address", Kind: "udp", Targets: []endpoint{{publicHost, 123}, {publicHost2, 4433}}}),
		},
		{
			ID: "egress.dns", Group: Egress, limit: short,
			Tried: "query public DNS resolvers, and tunnel data in names", Expected: "no name is resolved, and recorded in the audit",
			Wants: slices.Concat([]Want{
				noWay("a tunnel to a public resolver").unless(opening{at: netip.MustParseAddrPort(publicHost + ":53")}),
				noWay("a tunnel through the sandbox's own resolver").unless(opening{name: "any." + tunnelDomain}),
				control("the refusal of the tunnel is in the audit").unless(opening{name: "any." + tunnelDomain}),
			}, noWayTo(resolverTCP()...)),
			try: tryDNS,
		},
		{
			ID: "egress.icmp", Group: Egress, limit: short,
			Tried: "ping public addresses", Expected: "no reply within 5 s",
			Wants: []Want{noWay("ping a public address")},
			try:   inside(job{What: "ping a public address", Kind: "icmp", Targets: []string{publicHost, publicHost2}}),
		},
		{
			ID: "egress.ipv6", Group: Egress, limit: short,
			Tried: "connect over IPv6 by TCP and UDP", Expected: "no answer within 5 s",
			Wants: []Want{noWay("TCP over IPv6"), noWay("UDP over IPv6")},
			try: inside(
				job{What: "TCP over IPv6", Kind: "tcp", Targets: []endpoint{{publicHost6, 443}}},
				job{What: "UDP over IPv6", Kind: "udp", Targets: []endpoint{{publicHost6, 53}}}),
		},
		{
			ID: "egress.metadata", Group: Egress, limit: short,
			Tried: "connect to cloud metadata services", Expected: "refused within 5 s, and recorded in the audit",
			Wants: slices.Concat(noWayTo(metadataTCP()...), noWayToNames(metadataNames()...), []Want{noWay("a metadata service over IPv6")}),
			try: recorded(metadataTCP(), append(nameJobs(metadataNames()...),
				job{What: "a metadata service over IPv6", Kind: "tcp", Targets: []endpoint{{"fd00:ec2::254", 80}}})...),
		},
		{
			ID: "egress.host", Group: Egress, limit: short,
			Tried: "connect to ports of the server's machine", Expected: "refused within 5 s",
			Wants: []Want{noWay("the machine's addresses"), noWay("what it serves to everybody").unless(opening{own: true}), noWay("the gateway's other ports"), hidden("the API at the gateway, without a key")},
			try:   tryHost,
		},
		{
			ID: "egress.neighbours", Group: Egress, limit: short,
			Tried: "connect to a server in another sandbox", Expected: "no connection",
			Wants: []Want{control("the server in the other sandbox"), noWay("the other sandbox")},
			try:   tryNeighbour,
		},
		{
			ID: "egress.raw", Group: Egress, limit: short,
			Tried: "open raw and packet sockets, also as root", Expected: "refused",
			Wants: []Want{refused("a raw socket"), refused("a raw IPv6 socket"), refused("a packet socket")},
			try:   inside(rawJobs()...),
		},

		{
			ID: "ports.closed", Group: Ports, limit: short,
			Tried: "request ports of a sandbox on which nothing listens", Expected: "an error within 10 s",
			Wants: []Want{refused("a closed port"), refused("an invalid port"), refused("a port of an unknown sandbox")},
			try:   tryClosedPorts,
		},
		{
			ID: "ports.traffic", Group: Ports, limit: short,
			Tried: "request a port of a sandbox without its traffic token", Expected: "refused",
			Wants: []Want{
				control("with its token"), refused("without a token").unless(opening{ports: true}), refused("with another sandbox's token").unless(opening{ports: true}),
				refused("without a token, of a sandbox whose creator closed it"),
			},
			try: tryTraffic,
		},
		{
			ID: "ports.guest", Group: Ports, limit: short,
			Tried: "call the guest without a token, and with another sandbox's", Expected: "refused",
			Wants: []Want{control("with its token"), refused("without a token"), refused("with another sandbox's token")},
			try:   tryGuestPort,
		},
		{
			ID: "ports.key", Group: Ports, limit: short,
			Tried: "use the API with a wrong key, and look for the key", Expected: "refused, and the key is stored nowhere",
			Wants: []Want{refused("a wrong key"), absent("the key in the server's files"), absent("the key in the log")},
			try:   tryWrongKey,
		},

		{
			ID: "state.pause", Group: State, limit: long,
			Tried: "pause and resume with a file and a counting process", Expected: "both continue unchanged",
			Wants: []Want{control("the file"), control("the same process"), control("the count continues"), control("nothing answers while paused")},
			try:   tryPause,
		},

		{
			ID: "secrets.inside", Group: Secrets, limit: short,
			Tried: "find a secret's value in environment, memory and files", Expected: "only a placeholder is found",
			Wants: []Want{control("the placeholder"), absent("the value in the environment"), absent("the value in memory"), absent("the value in files")},
			try:   trySecret,
		},
		{
			ID: "secrets.snapshot", Group: Secrets, limit: long,
			Tried: "find a secret's value and the sandbox's token in a snapshot", Expected: "not found, but a known word of its memory is",
			Wants: []Want{control("a word of the sandbox's memory"), absent("the value"), absent("the sandbox's token")},
			try:   trySnapshot,
		},
		{
			ID: "secrets.log", Group: Secrets, limit: short,
			Tried: "find a secret's value in the server's log and files", Expected: "not found",
			Wants: []Want{control("the log is this server's"), absent("the value in the log"), absent("the value in the server's files")},
			try:   tryLog,
		},

		{
			ID: "teardown.calls", Group: Teardown, limit: short,
			Tried: "use a sandbox that was killed", Expected: "its guest, ports and API object are gone",
			Wants: []Want{control("the guest before the kill"), refused("the guest"), refused("the ports"), absent("the sandbox in the API"), absent("the sandbox in the list")},
			try:   tryGoneCalls,
		},
		{
			ID: "teardown.machine", Group: Teardown, limit: long,
			Tried: "find processes, cgroup, mounts and files of a killed sandbox", Expected: "found before the kill, gone after it, except its logs and its record of commands",
			Wants: []Want{control("traces before the kill"), absent("traces after the kill")},
			try:   tryGoneMachine,
		},

		{
			ID: "templates.failing", Group: Templates, limit: 2 * time.Minute,
			Tried: "build a template whose second step exits with 3", Expected: "the build fails, names the status, and leaves no template",
			Wants: []Want{refused("the build"), control("the reason"), noWay("a sandbox from the template")},
			try:   tryFailingBuild,
		},

		{
			ID: "bombs.processes", Group: Bombs, limit: long,
			Tried: "start processes without end", Expected: bombExpected,
			Wants: bombWants, try: bomb(forkBomb),
		},
		{
			ID: "bombs.memory", Group: Bombs, limit: long,
			Tried: "take more memory than the sandbox has", Expected: bombExpected,
			Wants: bombWants, try: bomb(memoryBomb),
		},
		{
			ID: "bombs.disk", Group: Bombs, limit: long,
			Tried: "take more disk than the sandbox has", Expected: bombExpected,
			Wants: bombWants, try: bomb(diskBomb),
		},
		{
			ID: "bombs.output", Group: Bombs, limit: long,
			Tried: "write endless output to a client that reads nothing", Expected: "the output is blocked; the server answers; the sandbox can be killed",
			Wants: bombWants, try: tryOutputFlood,
		},
	}
}

// inside makes attempts in the sandbox that the checks share.
func inside(jobs ...job) func(context.Context, *session) ([]Attempt, error) {
	return func(ctx context.Context, s *session) ([]Attempt, error) {
		b, err := s.shared(ctx)
		if err != nil {
			return nil, err
		}
		return b.attempts(ctx, jobs...)
	}
}

// recorded makes attempts in the shared sandbox and tries to reach destinations from there,
// and then looks for the refusals of these in the audit.
func recorded(to []destination, jobs ...job) func(context.Context, *session) ([]Attempt, error) {
	for _, d := range to {
		if !d.quiet {
			jobs = append(jobs, job{What: d.what(), Kind: "reach", Targets: []endpoint{{d.at.Addr().String(), int(d.at.Port())}}})
		}
	}
	return func(ctx context.Context, s *session) ([]Attempt, error) {
		made, err := inside(jobs...)(ctx, s)
		if err != nil {
			return made, err
		}
		var of []string
		for _, d := range to {
			of = append(of, d.at.String())
		}
		return append(made, s.box.refusals(ctx, of...)...), nil
	}
}

// guestJobs returns attempts to read the guest, which is process pid of the sandbox.
func guestJobs(pid string) []job {
	proc := "/proc/" + pid + "/"
	return []job{
		{What: "its own memory", Kind: "memory", Targets: []string{"self"}},
		{What: "the guest's environment", Kind: "read", Targets: []string{proc + "environ"}, Root: true},
		{What: "the guest's memory", Kind: "memory", Targets: []string{pid}, Root: true},
		{What: "the guest's open files", Kind: "list", Targets: []string{proc + "fd"}, Root: true},
		{What: "the guest's program through /proc", Kind: "read", Targets: []string{proc + "exe"}, Root: true},
		{What: "the guest's root directory", Kind: "read", Targets: []string{proc + "root"}, Root: true},
	}
}

// kernelJobs returns attempts that need rights over the sandbox's kernel or over process pid.
func kernelJobs(pid string) []job {
	return []job{
		{What: "its own directory", Kind: "read", Targets: []string{"/proc/self/cwd"}},
		{What: "mount a file system", Kind: "mount", Targets: []string{"proc", "bind"}, Root: true},
		{What: "open a device that it made", Kind: "device", Targets: [][2]string{{"b", "8:0"}, {"b", "253:0"}, {"c", "1:1"}, {"c", "10:232"}}, Root: true},
		{What: "trace the guest", Kind: "ptrace", Targets: []string{pid}, Root: true},
		{What: "load a kernel module", Kind: "module", Targets: []string{""}, Root: true},
	}
}

// rawJobs returns attempts to open sockets that can forge packets.
func rawJobs() []job {
	return []job{
		{What: "a raw socket", Kind: "raw", Targets: []string{"raw"}, Root: true},
		{What: "a raw IPv6 socket", Kind: "raw", Targets: []string{"raw6"}, Root: true},
		{What: "a packet socket", Kind: "raw", Targets: []string{"packet"}, Root: true},
	}
}

// hostJobs returns attempts to find files of the server by their names, and to read files
// of the machine.
func hostJobs(names ...string) []job {
	return []job{
		{What: "a file of its own", Kind: "read", Targets: []string{"/etc/passwd"}},
		{What: "the server's files", Kind: "called", Names: append([]string{"postern.db", "postern.sock", "keeper.sock", "server.key", "project.key", "setup.link"}, names...), Root: true},
		{What: "the host's kernel log and disks", Kind: "read", Targets: []string{"/dev/kmsg", "/dev/mem", "/dev/sda", "/dev/vda", "/dev/nvme0n1", "/dev/kvm", "/proc/kcore", "/sys/kernel/debug/tracing/trace"}, Root: true},
	}
}

func tryHostFiles(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.shared(ctx)
	if err != nil {
		return nil, err
	}
	made, err := b.attempts(ctx, hostJobs()...)
	if err != nil {
		return made, err
	}
	// Processes of the host have known names.
	out, _, err := b.run(ctx, nil, "python3", "-I", "-c", "import os; print(' '.join(open('/proc/%s/comm' % p).read().strip() for p in os.listdir('/proc') if p.isdigit()))")
	if err != nil {
		return made, err
	}
	a := Attempt{"the host's processes", Absent, "only its own"}
	for name := range strings.FieldsSeq(out) {
		if name == "postern" || name == "postern-runtime" || strings.HasPrefix(name, "runsc") || name == "kthreadd" {
			a = Attempt{a.What, Done, name}
		}
	}
	return append(made, a), nil
}

func tryOtherFiles(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.shared(ctx)
	if err != nil {
		return nil, err
	}
	other, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	name := s.marker + ".file"
	write := "n=0\nfor d in ('/tmp', '/dev/shm', '/var/tmp', '.'):\n try:\n  open(d + '/" + name + "', 'w').write('x'); n += 1\n except OSError: pass\nprint(n)"
	out, _, err := other.run(ctx, nil, "python3", "-I", "-c", write)
	if err != nil {
		return nil, err
	}
	wrote := Attempt{"the write in the other sandbox", Broken, "nothing could be written"}
	if n, err := strconv.Atoi(strings.TrimSpace(out)); err == nil && n > 0 {
		wrote = Attempt{wrote.What, Done, fmt.Sprintf("%d files", n)}
	}
	made, err := b.attempts(ctx, job{What: "the other sandbox's files", Kind: "called", Names: []string{name}, Root: true})
	return append(made, wrote), errors.Join(err, other.kill(ctx))
}

// tunnelDomain is a domain that nobody has.
const tunnelDomain = "exfiltrated.example"

func tryDNS(ctx context.Context, s *session) ([]Attempt, error) {
	name := s.marker + "." + tunnelDomain
	made, err := recorded(resolverTCP(),
		job{What: "a tunnel to a public resolver", Kind: "dns", Lookup: name, Targets: []endpoint{{publicHost, 53}, {publicHost2, 53}}},
		job{What: "a tunnel through the sandbox's own resolver", Kind: "resolve", Targets: []string{name, "data." + name}},
	)(ctx, s)
	if err != nil {
		return made, err
	}
	refusal := s.box.refusals(ctx, name)[0]
	refusal.What = "the refusal of the tunnel is in the audit"
	return append(made, refusal), nil
}

// gateway is the only other address on a sandbox's link. The server serves sandboxes there.
const gateway = "10.0.0.1"

func tryHost(ctx context.Context, s *session) ([]Attempt, error) {
	if s.Machine == nil {
		return nil, errElsewhere
	}
	hosts, err := addresses()
	if err != nil {
		return nil, err
	}
	ports := append([]uint16{22}, s.Machine.Ports...)
	made, err := inside(hostPortJobs(&s.Settings, hosts, gateway, ports)...)(ctx, s)
	const open = "what it serves to everybody"
	if err == nil && !slices.ContainsFunc(made, func(a Attempt) bool { return a.What == open }) {
		made = append(made, Attempt{open, Absent, "no setting opens a port of it"})
	}
	return made, err
}

// hostPortJobs returns attempts to connect to ports of the machine, at its own addresses and
// at the gateway. Those that settings open are an attempt of their own, so that they hide
// none of the others.
func hostPortJobs(settings *Settings, hosts []string, gate string, ports []uint16) []job {
	// The server serves sandboxes there: postern.internal, and those of mail.
	serving := []uint16{25, 80, 443, 465, 587, 2525}
	machine, open, other := []endpoint{}, []endpoint{}, []endpoint{}
	for _, p := range ports {
		for _, h := range hosts {
			if settings.opensOwn(h, p) {
				open = append(open, endpoint{h, p})
			} else {
				machine = append(machine, endpoint{h, p})
			}
		}
		if !slices.Contains(serving, p) {
			other = append(other, endpoint{gate, p})
		}
	}
	if len(machine) == 0 { // the machine has no network: only the gateway can be tried
		machine = other
	}
	const request = "GET /v2/sandboxes HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
	jobs := []job{
		{What: "the machine's addresses", Kind: "tcp", Targets: machine},
		{What: "the gateway's other ports", Kind: "tcp", Targets: other},
		{What: "the API at the gateway, without a key", Kind: "http", Targets: [][3]any{{gate, 80, request}}},
	}
	if len(open) > 0 {
		jobs = append(jobs, job{What: "what it serves to everybody", Kind: "tcp", Targets: open})
	}
	return jobs
}

// errElsewhere is the error of checks that must look at the server's machine.
var errElsewhere = errors.New("the server runs on another machine, or this user may not inspect its process: run this as root on the server's machine")

// servedPort is where box.serve listens.
const servedPort = 7391

// serve starts a web server in the sandbox, on all of its addresses.
func (b *box) serve(ctx context.Context) error {
	source := fmt.Sprintf("import os, socket, sys, time\nl = socket.create_server(('0.0.0.0', %d))\nif os.fork(): sys.exit()\nos.setsid(); os.close(0); os.close(1); os.close(2)\nfor _ in range(99):\n c, _ = l.accept(); c.recv(4096); c.send(b'HTTP/1.0 200 OK\\r\\n\\r\\n'); c.close()", servedPort)
	if _, code, err := b.run(ctx, nil, "python3", "-I", "-c", source); err != nil || code != 0 {
		return errors.Join(err, fmt.Errorf("the server in sandbox %s exited with status %d", b.id, code))
	}
	return nil
}

func tryNeighbour(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.shared(ctx)
	if err != nil {
		return nil, err
	}
	other, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	if err := other.serve(ctx); err != nil {
		return nil, err
	}
	control, err := other.attempts(ctx, job{What: "the server in the other sandbox", Kind: "tcp", Targets: []endpoint{{"127.0.0.1", servedPort}}})
	if err != nil {
		return nil, err
	}
	// Which address another sandbox could use for it is a guess.
	const port = servedPort
	var near []endpoint
	for i := range 12 {
		near = append(near, endpoint{fmt.Sprintf("10.0.0.%d", i), port})
	}
	near = append(near, endpoint{"10.0.1.2", port}, endpoint{"10.0.255.255", port}, endpoint{"172.17.0.2", port}, endpoint{"255.255.255.255", port})
	made, err := b.attempts(ctx, job{What: "the other sandbox", Kind: "tcp", Targets: near})
	return append(control, made...), errors.Join(err, other.kill(ctx))
}

// request makes a request of this program, for at most ten seconds, and returns its outcome.
// An error or a status of 400 or more is Refused, and a timeout is Silent.
func request(ctx context.Context, what string, f func(ctx context.Context) (status int, err error)) Attempt {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	status, err := f(ctx)
	switch {
	case ctx.Err() != nil:
		return Attempt{what, Silent, "no answer in 10 s"}
	case err != nil:
		return Attempt{what, Refused, clean(err.Error())}
	case status >= 400:
		return Attempt{what, Refused, strconv.Itoa(status)}
	}
	return Attempt{what, Done, strconv.Itoa(status)}
}

func tryClosedPorts(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.shared(ctx)
	if err != nil {
		return nil, err
	}
	port := func(b *box, port int) func(context.Context) (int, error) {
		return func(ctx context.Context) (int, error) { return b.get(ctx, port, b.traffic) }
	}
	unknown := &box{s: s, id: "i" + strings.Repeat("0", 20), traffic: b.traffic}
	return []Attempt{
		request(ctx, "a closed port", port(b, 7392)),
		request(ctx, "an invalid port", port(b, 70000)),
		request(ctx, "a port of an unknown sandbox", port(unknown, 7392)),
	}, nil
}

// guestStatus asks the guest of b for a file, with an access token or, if it is empty,
// without one. It returns the HTTP status.
func (b *box) guestStatus(ctx context.Context, token string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.s.Base+"/files?path=/etc/passwd", http.NoBody)
	if err != nil {
		return 0, err
	}
	b.address(req, guestPort)
	if token != "" {
		req.Header.Set("X-Access-Token", token)
	}
	resp, err := b.s.HTTP.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	return resp.StatusCode, err
}

func tryTraffic(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	// Its creator asks for a token. So no setting of the operator opens it.
	closed, err := s.create(ctx, map[string]any{"secure": true, "network": map[string]any{"allowPublicTraffic": false}})
	if err != nil {
		return nil, err
	}
	for _, each := range []*box{b, closed} {
		if err := each.serve(ctx); err != nil {
			return nil, err
		}
	}
	with := func(b *box, token string) func(context.Context) (int, error) {
		return func(ctx context.Context) (int, error) { return b.get(ctx, servedPort, token) }
	}
	if a := request(ctx, "x", with(closed, closed.traffic)); a.Outcome != Done {
		return nil, fmt.Errorf("the server in the closed sandbox: %v", a)
	}
	return []Attempt{
		request(ctx, "with its token", with(b, b.traffic)),
		request(ctx, "without a token", with(b, "")),
		request(ctx, "with another sandbox's token", with(b, closed.traffic)),
		request(ctx, "without a token, of a sandbox whose creator closed it", with(closed, "")),
	}, errors.Join(b.kill(ctx), closed.kill(ctx))
}

func tryGuestPort(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.shared(ctx)
	if err != nil {
		return nil, err
	}
	other, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	with := func(token string) func(context.Context) (int, error) {
		return func(ctx context.Context) (int, error) { return b.guestStatus(ctx, token) }
	}
	return []Attempt{
		request(ctx, "with its token", with(b.access)),
		request(ctx, "without a token", with("")),
		request(ctx, "with another sandbox's token", with(other.access)),
	}, other.kill(ctx)
}

func tryWrongKey(ctx context.Context, s *session) ([]Attempt, error) {
	if s.Machine == nil {
		return nil, errElsewhere
	}
	key := "e2b_" + canary()[4:44]
	use := request(ctx, "a wrong key", func(ctx context.Context) (int, error) { return s.Machine.wrongKey(ctx, key) })
	found, err := s.Machine.filesWith(key)
	if err != nil {
		return []Attempt{use}, err
	}
	return []Attempt{use, notFound("the key in the server's files", found[key]), s.Machine.inLog("the key in the log", key)}, nil
}

// notFound returns the attempt to find something in files. It succeeded if there are any.
func notFound(what string, files []string) Attempt {
	if len(files) > 0 {
		return Attempt{what, Done, files[0]}
	}
	return Attempt{what, Absent, ""}
}

// inLog looks for text in the server's log.
func (m *Machine) inLog(what, text string) Attempt {
	if m.Log == "" {
		return Attempt{what, Broken, "the server's log file is not known: name it with --log"}
	}
	found, err := search(m.Log, []string{text})
	switch {
	case err != nil:
		return Attempt{what, Broken, clean(err.Error())}
	case len(found) > 0:
		return Attempt{what, Done, "found"}
	}
	return Attempt{what, Absent, ""}
}

// counting writes its argument to a file, and starts a process that counts in another file.
const counting = `
import os, sys, time
open('verify.txt', 'w').write(sys.argv[1])
if os.fork(): sys.exit()
os.setsid(); os.close(0); os.close(1); os.close(2)
open('verify.pid', 'w').write(str(os.getpid()))
n = 0
while True:
    n += 1
    open('verify.new', 'w').write(str(n)); os.rename('verify.new', 'verify.count')
    time.sleep(0.05)
`

func tryPause(ctx context.Context, s *session) ([]Attempt, error) {
	b, err := s.create(ctx, nil)
	if err != nil {
		return nil, err
	}
	if _, code, err := b.run(ctx, nil, "python3", "-I", "-c", counting, s.marker); err != nil || code != 0 {
		return nil, errors.Join(err, fmt.Errorf("the counting process exited with status %d", code))
	}
	before, err := b.waitCount(ctx, 0)
	if err != nil {
		return nil, err
	}
	if err := s.API.Sandboxes.Pause(ctx, b.id); err != nil {
		return nil, err
	}
	paused := Attempt{"nothing answers while paused", Done, ""}
	if status, err := b.guestStatus(ctx, b.access); err == nil && status < 400 {
		paused = Attempt{paused.What, Refused, "the guest answers"}
	}
	if _, err := s.API.Sandboxes.Resume(ctx, b.id, 5*time.Minute); err != nil {
		return nil, err
	}
	after, err := b.waitCount(ctx, before.count)
	if err != nil {
		return nil, err
	}
	same := func(what string, ok bool, detail string) Attempt {
		if ok {
			return Attempt{what, Done, ""}
		}
		return Attempt{what, Refused, detail}
	}
	return []Attempt{
		same("the file", after.text == s.marker, "its content has changed"),
		same("the same process", after.pid == before.pid && after.runs, "it is another process, or has ended"),
		same("the count continues", after.count > before.count, "the count has stopped"),
		paused,
	}, b.kill(ctx)
}

// A counted is the state of the counting process in a sandbox.
type counted struct {
	text, pid string
	count     int
	runs      bool
}

// waitCount waits for at most 20 seconds until the counting process in b has passed count.
func (b *box) waitCount(ctx context.Context, count int) (c counted, err error) {
	const look = "import os\ntry:\n r = lambda n: open('verify.' + n).read()\n p = r('pid'); print(r('txt'), p, r('count'), os.path.exists('/proc/' + p))\nexcept OSError: pass"
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		out, _, err := b.run(ctx, nil, "python3", "-I", "-c", look)
		if err != nil {
			return c, err
		}
		f := strings.Fields(out)
		if len(f) != 4 {
			continue
		}
		n, err := strconv.Atoi(f[2])
		if err != nil {
			continue
		}
		if c = (counted{f[0], f[1], n, f[3] == "True"}); c.count > count {
			return c, nil
		}
	}
	return c, nil
}

// lookup returns the attempt to find something through the API, by the error of the request.
func lookup(what string, err error) Attempt {
	switch {
	case errors.Is(err, client.ErrNotFound):
		return Attempt{what, Absent, ""}
	case err != nil:
		return Attempt{what, Broken, clean(err.Error())}
	}
	return Attempt{what, Done, "found"}
}
