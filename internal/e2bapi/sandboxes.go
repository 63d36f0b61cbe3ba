package e2bapi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/sandbox"
)

// guestVersion is the version of E2B's guest that ours is compatible with.
const guestVersion = "0.6.13"

// newSandbox is the request body of create in E2B's v1 and v2.
type newSandbox struct {
	TemplateID     string            `json:"templateID"`
	Timeout        *int64            `json:"timeout"` // seconds
	Metadata       map[string]string `json:"metadata"`
	EnvVars        map[string]string `json:"envVars"`
	InternetAccess *bool             `json:"allow_internet_access"`
	Network        *network          `json:"network"`
	Secure         *bool             `json:"secure"` // v1; every sandbox is, see private

	AutoPause       bool                  `json:"autoPause"`
	AutoPauseMemory *bool                 `json:"autoPauseMemory"`
	AutoResume      *autoResume           `json:"autoResume"`
	IAM             *iam                  `json:"iam"`
	MCP             json.RawMessage       `json:"mcp"`
	VolumeMounts    []sandbox.VolumeMount `json:"volumeMounts"`
}

// autoResume is E2B's object of that name in create.
type autoResume struct {
	Enabled bool `json:"enabled"`
}

// given reports whether an optional field has a value.
func given(m json.RawMessage) bool {
	s := strings.TrimSpace(string(m))
	return s != "" && s != "null" && s != "{}" && s != "[]"
}

// options returns the other requested settings.
func (b *newSandbox) options(timeout time.Duration, publicPorts bool) (sandbox.Options, error) {
	bad := func(field, format string, a ...any) (sandbox.Options, error) {
		return sandbox.Options{}, fmt.Errorf("%w: %s: %s", errRequest, field, fmt.Sprintf(format, a...))
	}
	o := sandbox.Options{
		Timeout: timeout, AutoPause: b.AutoPause, AutoResume: b.AutoResume != nil && b.AutoResume.Enabled, Volumes: b.VolumeMounts,
		FilesOnly: b.AutoPauseMemory != nil && !*b.AutoPauseMemory,
	}
	n := b.Network
	if n == nil {
		n = &network{}
	}
	// If the operator allows public ports, E2B's default applies: public.
	o.Traffic.Public = publicPorts && (n.AllowPublicTraffic == nil || *n.AllowPublicTraffic)
	if n.AllowPublicTraffic != nil && *n.AllowPublicTraffic && !publicPorts {
		return bad("network.allowPublicTraffic", "ports need the traffic token on this server; its operator can allow public ports with --public-ports")
	}
	if len(n.MaskRequestHost) > 255 || strings.ContainsFunc(n.MaskRequestHost, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("/\\@?#", r) }) {
		return bad("network.maskRequestHost", "want a host name, at most 255 bytes")
	}
	o.Traffic.MaskHost = n.MaskRequestHost
	if len(n.HTTPSPorts) > 64 {
		return bad("network.httpsPorts", "has %d ports, at most 64 are allowed", len(n.HTTPSPorts))
	}
	for i, p := range n.HTTPSPorts {
		if p < 1 || p > 65535 || p == sandbox.GuestPort {
			return bad(fmt.Sprintf("network.httpsPorts[%d]", i), "want a TCP port other than %d", sandbox.GuestPort)
		}
		o.Traffic.HTTPSPorts = append(o.Traffic.HTTPSPorts, uint16(p))
	}
	return o, nil
}

// private refuses what E2B's v1 refuses: a sandbox whose ports need a token, and whose
// data plane needs none.
func (b *newSandbox) private() error {
	if n := b.Network; (b.Secure == nil || !*b.Secure) && n != nil && n.AllowPublicTraffic != nil && !*n.AllowPublicTraffic {
		return fmt.Errorf("%w: network.allowPublicTraffic: You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag.", errRequest) //nolint:revive,staticcheck // E2B's text
	}
	return nil
}

// timeoutOf converts a timeout in seconds to a duration without overflow. A missing
// one is unset.
func timeoutOf(seconds *int64, unset time.Duration) time.Duration {
	if seconds == nil {
		return unset
	}
	const longest = 1 << 31 // above any limit, and no overflow in nanoseconds
	return time.Duration(min(max(*seconds, -longest), longest)) * time.Second
}

// unsetTimeout returns the timeout of a new sandbox if the request has none.
func unsetTimeout(r *http.Request) time.Duration {
	if strings.HasPrefix(r.URL.Path, "/v2/") {
		return 300 * time.Second
	}
	return 15 * time.Second
}

// create creates a sandbox. The two versions of the route differ only in the
// default timeout.
func (s *Server) create(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b newSandbox
	if err := decode(r, &b); err != nil {
		return err
	}
	if b.Metadata[ContractMetadata] != "" {
		info, err := s.createBound(r, who, &b)
		if err != nil {
			return err
		}
		reply(w, http.StatusCreated, s.sandbox(info))
		return nil
	}
	if err := s.gateway(&b); err != nil {
		return err
	}
	egress, err := s.egress(who, &b)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(r.URL.Path, "/v2/") {
		if err := b.private(); err != nil {
			return err
		}
	}
	// The operator's mirrors, unless the creator says otherwise.
	for name, value := range s.conf.Ceiling.Environment(egress.Packages) {
		if _, ok := b.EnvVars[name]; !ok {
			if b.EnvVars == nil {
				b.EnvVars = map[string]string{}
			}
			b.EnvVars[name] = value
		}
	}
	options, err := b.options(timeoutOf(b.Timeout, unsetTimeout(r)), s.conf.PublicPorts)
	if err != nil {
		return err
	}
	options.Traffic.MCP = given(b.MCP)
	asked := cmp.Or(b.TemplateID, "base")
	if len(asked) > 256 {
		return fmt.Errorf("%w: templateID: is longer than 256 bytes", errRequest)
	}
	req := sandbox.Request{
		Asked: asked, Metadata: b.Metadata, EnvVars: b.EnvVars, Egress: egress, Options: options, InboxKey: auth.Secret(r.Header.Get(InboxKeyHeader)),
	}
	if req.Template, req.Snapshot, err = s.resolve(r.Context(), who, asked); err != nil {
		return err
	}
	if address := b.Metadata[InboxMetadata]; address != "" {
		inbox, err := s.mail.Directory.Find(r.Context(), who, address)
		if err != nil {
			return fmt.Errorf("metadata[%q]: %w", InboxMetadata, err)
		}
		req.Inbox = inbox.ID
	}
	if err := s.attachSecrets(r.Context(), who, b.EnvVars, b.Metadata, &req.Egress); err != nil {
		return err
	}
	info, err := s.fleet.Create(r.Context(), who, req)
	if err != nil {
		return nameInboxKey(err)
	}
	reply(w, http.StatusCreated, s.sandbox(info))
	return nil
}

// nameInboxKey names the header if err is about the inbox key.
func nameInboxKey(err error) error {
	if loan, ok := errors.AsType[*sandbox.LoanError](err); ok {
		return fmt.Errorf("header %s: %w", InboxKeyHeader, loan.Err)
	}
	return err
}

// resolve finds a template by its name, or a snapshot by its ID or name: for E2B's
// clients a snapshot is a template.
func (s *Server) resolve(ctx context.Context, who auth.Principal, name string) (id, snapshot string, err error) {
	t, err := s.conf.Builds.Resolve(ctx, who, name)
	if err == nil {
		return t.ID, "", nil
	}
	if !errors.Is(err, build.ErrNotFound) {
		return "", "", err
	}
	n, serr := s.fleet.FindSnapshot(ctx, who, name)
	if serr == nil {
		return n.Template, n.ID, nil
	}
	if errors.Is(serr, sandbox.ErrNoSnapshot) {
		serr = err
	}
	return "", "", serr
}

// Template returns the ID of the template that who calls name, and the ID of a snapshot
// of it if name is a snapshot's.
func (s *Server) Template(ctx context.Context, who auth.Principal, name string) (id, snapshot string, err error) {
	return s.resolve(ctx, who, name)
}

// templateIDs returns the exact templates that a name may have stood for when a sandbox
// was created: all builds of a template, or only that of a tag. Unknown names have none.
func (s *Server) templateIDs(ctx context.Context, who auth.Principal, name string) (map[string]bool, error) {
	ids := map[string]bool{name: true}
	t, err := s.conf.Builds.Resolve(ctx, who, name)
	if err == nil {
		ids[t.ID] = true
	}
	if err == nil && t.Template == nil || strings.Contains(name, ":") {
		return ids, nil
	}
	builds, err := s.conf.Builds.Builds(ctx, who, name)
	if err != nil && !errors.Is(err, build.ErrNotFound) && !errors.Is(err, build.ErrForbidden) {
		return nil, err
	}
	for _, b := range builds {
		ids[build.SandboxID(b.ID)] = true
	}
	return ids, nil
}

// sandbox returns the answer to create and connect.
func (s *Server) sandbox(i sandbox.Info) map[string]any {
	m := map[string]any{
		"sandboxID": i.ID, "templateID": i.Asked, "clientID": "postern", "envdVersion": guestVersion,
		"envdAccessToken":    s.fleet.AccessToken(i.ID).Reveal(),
		"trafficAccessToken": s.fleet.TrafficToken(i.ID).Reveal(),
		"domain":             nil,
	}
	if s.conf.Domain != "" {
		m["domain"] = s.conf.Domain
	}
	if a := alias(i.Asked); a != "" {
		m["alias"] = a
	}
	return m
}

// alias returns the name of a template or a snapshot as E2B's clients show it: without
// namespace and tag. IDs have none.
func alias(asked string) string {
	a := untagged(asked[strings.LastIndex(asked, "/")+1:])
	if templateID().MatchString(a) || snapshotID().MatchString(a) {
		return ""
	}
	return a
}

// What the IDs of templates and snapshots look like.
var (
	templateID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z2-7]{20}$`) })
	snapshotID = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^s[a-z0-9]{20}$`) })
)

// listed returns an entry of a list of sandboxes.
func listed(i sandbox.Info) map[string]any {
	state := sandbox.Running
	if !running(i) {
		state = sandbox.Paused
	}
	m := map[string]any{
		"sandboxID": i.ID, "templateID": i.Asked, "clientID": "postern", "envdVersion": guestVersion,
		"startedAt": i.Started.Format(time.RFC3339Nano), "endAt": i.Ends.Format(time.RFC3339Nano), "state": state,
		"cpuCount": int64(i.CPUs), "memoryMB": i.MemoryMB, "diskSizeMB": i.DiskMB, "metadata": shownMetadata(i),
	}
	if a := alias(i.Asked); a != "" {
		m["alias"] = a
	}
	if len(i.Options.Volumes) > 0 {
		m["volumeMounts"] = i.Options.Volumes
	}
	return m
}

// running reports whether the sandbox is running in E2B's terms, and not paused. A
// sandbox that the server froze at its stop counts as running, since the server
// resumes it.
func running(i sandbox.Info) bool {
	return i.State == sandbox.Running || i.State == sandbox.Pausing || i.Restart
}

// get answers with the details of a sandbox.
func (s *Server) get(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	i, err := s.fleet.Get(r.Context(), who, shortID(r.PathValue("id")))
	if err != nil {
		return err
	}
	m := listed(i)
	m["envdAccessToken"] = s.fleet.AccessToken(i.ID).Reveal()
	m["domain"] = nil
	if s.conf.Domain != "" {
		m["domain"] = s.conf.Domain
	}
	// The effective value, which is lower than requested if the project's ceiling
	// is.
	m["allowInternetAccess"] = i.Egress.Internet && s.conf.Ceiling.Internet
	network := networkOf(i.Egress)
	network["allowPublicTraffic"] = i.Options.Traffic.Public
	if h := i.Options.Traffic.MaskHost; h != "" {
		network["maskRequestHost"] = h
	}
	if p := i.Options.Traffic.HTTPSPorts; len(p) > 0 {
		network["httpsPorts"] = p
	}
	m["network"] = network
	onTimeout := "kill"
	if i.Options.AutoPause {
		onTimeout = "pause"
	}
	m["lifecycle"] = map[string]any{"onTimeout": onTimeout, "autoResume": i.Options.AutoResume}
	reply(w, http.StatusOK, m)
	return nil
}

// orEmpty returns s, or an empty slice instead of nil: clients expect [] and not
// null.
func orEmpty(s []string) []string {
	if s == nil {
		return []string{}
	}
	return s
}

// kill ends a sandbox.
func (s *Server) kill(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if err := s.fleet.Kill(r.Context(), who, shortID(r.PathValue("id"))); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// setTimeout sets when a sandbox ends. Unlike connect it may shorten its life.
func (s *Server) setTimeout(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if b.Timeout == nil {
		return fmt.Errorf("%w: timeout: want a number of seconds", errRequest)
	}
	if _, err := s.fleet.SetTimeout(r.Context(), who, shortID(r.PathValue("id")), timeoutOf(b.Timeout, 0), false); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// list answers with a page of sandboxes, newest first by default.
func (s *Server) list(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q, err := parseListQuery(r.URL.Query())
	if err != nil {
		return err
	}
	if q.template != "" {
		if q.templates, err = s.templateIDs(r.Context(), who, q.template); err != nil {
			return err
		}
	}
	all, err := s.fleet.List(r.Context(), who, false)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(i sandbox.Info) bool { return !q.matches(i) })
	total := 0 // over all pages
	for _, i := range all {
		if running(i) {
			total++
		}
	}
	slices.SortFunc(all, func(a, b sandbox.Info) int {
		c := cmp.Or(a.Started.Compare(b.Started), strings.Compare(a.ID, b.ID))
		if q.ascending {
			return c
		}
		return -c
	})
	if q.after != "" {
		i := slices.IndexFunc(all, func(i sandbox.Info) bool { return q.past(i) })
		if i < 0 {
			i = len(all)
		}
		all = all[i:]
	}
	if len(all) > q.limit {
		last := all[q.limit-1]
		setNextToken(w, cursor(last.Started, last.ID))
		all = all[:q.limit]
	}
	if q.running {
		w.Header().Set("X-Total-Running", strconv.Itoa(total))
	}
	reply(w, http.StatusOK, each(all, listed))
	return nil
}

// listRunning is E2B's v1 of list: the running sandboxes, newest first, on one
// page. Its callers know no cursor, and would miss a second page.
func (s *Server) listRunning(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q, err := parseListQuery(url.Values{"metadata": r.URL.Query()["metadata"], "state": {"running"}})
	if err != nil {
		return err
	}
	all, err := s.fleet.List(r.Context(), who, false)
	if err != nil {
		return err
	}
	all = slices.DeleteFunc(all, func(i sandbox.Info) bool { return !q.matches(i) })
	slices.SortFunc(all, func(a, b sandbox.Info) int {
		return cmp.Or(b.Started.Compare(a.Started), strings.Compare(b.ID, a.ID))
	})
	reply(w, http.StatusOK, each(all, listed))
	return nil
}

// A listQuery holds the filters of list.
type listQuery struct {
	metadata  map[string]string
	running   bool
	paused    bool
	template  string
	templates map[string]bool // exact templates that template stands for
	since     time.Time
	ascending bool
	page
}

// past reports whether i comes after the cursor.
func (q *listQuery) past(i sandbox.Info) bool {
	if q.ascending {
		return cursor(i.Started, i.ID) > q.after
	}
	return cursor(i.Started, i.ID) < q.after
}

// matches reports whether a sandbox passes all filters of the query.
func (q *listQuery) matches(i sandbox.Info) bool {
	for k, v := range q.metadata {
		if got, ok := i.Metadata[k]; !ok || got != v {
			return false
		}
	}
	if running(i) && !q.running || !running(i) && !q.paused {
		return false
	}
	return (q.template == "" || q.templates[i.Template] || q.template == i.Asked) && !i.Started.Before(q.since)
}

// parseListQuery parses the filters and the page of list.
func parseListQuery(v url.Values) (*listQuery, error) {
	p, err := pageOf(v)
	if err != nil {
		return nil, err
	}
	q := &listQuery{metadata: map[string]string{}, template: v.Get("template"), page: p}
	bad := func(field, want string) error { return fmt.Errorf("%w: %s: %s", errRequest, field, want) }
	switch v.Get("order") {
	case "", "desc":
	case "asc":
		q.ascending = true
	default:
		return nil, bad("order", "want asc or desc")
	}
	var states []string
	for _, s := range v["state"] {
		states = append(states, strings.Split(s, ",")...)
	}
	for _, s := range states {
		if s != "running" && s != "paused" {
			return nil, bad("state", "want running or paused")
		}
	}
	q.running = len(states) == 0 || slices.Contains(states, "running")
	q.paused = len(states) == 0 || slices.Contains(states, "paused")
	if s := v.Get("startedAfter"); s != "" {
		t, err := time.Parse(time.RFC3339, s)
		if err != nil {
			return nil, bad("startedAfter", "want a time as in RFC 3339")
		}
		q.since = t
	}
	// The JavaScript SDK escapes keys and values once more within the query.
	m, err := url.ParseQuery(v.Get("metadata"))
	if err != nil {
		return nil, bad("metadata", "want a query string")
	}
	for _, k := range slices.Sorted(maps.Keys(m)) {
		key, err1 := url.QueryUnescape(k)
		val, err2 := url.QueryUnescape(m.Get(k))
		if err1 != nil || err2 != nil {
			return nil, bad("metadata", "want escaped keys and values")
		}
		q.metadata[key] = val
	}
	return q, nil
}
