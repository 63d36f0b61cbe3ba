package e2bapi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/registry"
	"postern/internal/sandbox"
)

// templateRoutes adds the routes for templates and their builds. Uploads of files carry
// a signature of their own; see upload.go.
func (s *Server) templateRoutes(mux *http.ServeMux, handle func(pattern string, h handlerFunc)) {
	handle("POST /v3/templates", s.createTemplate)
	handle("POST /v2/templates", s.createTemplateV2)
	handle("GET /templates", s.listTemplates)
	handle("GET /v2/templates", s.listTemplatesV2)
	handle("GET /templates/{template}", s.getTemplate)
	handle("PATCH /templates/{template}", s.publishTemplate)
	handle("PATCH /v2/templates/{template}", s.publishTemplate)
	handle("DELETE /templates/{template}", s.deleteTemplate)
	handle("POST /templates/tags", s.assignTags)
	handle("DELETE /templates/tags", s.removeTags)
	// "aliases" is in the place of a template, which patterns of the mux cannot tell
	// apart.
	handle("GET /templates/{template}/{what}", func(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
		switch name, what := r.PathValue("template"), r.PathValue("what"); {
		case name == "aliases":
			return s.alias(w, r, who, what)
		case what == "tags":
			return s.listTags(w, r, who)
		case what == "record":
			return s.templateRecord(w, r, who, name)
		case what == "spdx":
			return s.templateSPDX(w, r, who, name)
		case what == "image":
			return s.exportTemplate(w, r, who, name)
		}
		return noRoute(w, r)
	})
	handle("GET /templates/{template}/{what}/{which}", func(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
		switch name, what, which := r.PathValue("template"), r.PathValue("what"), r.PathValue("which"); {
		case name == "aliases":
			return s.alias(w, r, who, what+"/"+which)
		case what == "files":
			return s.templateFiles(w, r, who, name, which)
		}
		return noRoute(w, r)
	})
	handle("POST /v2/templates/{template}/builds/{build}", s.startBuild)
	handle("GET /templates/{template}/builds/{build}/status", s.buildStatus)
	handle("GET /templates/{template}/builds/{build}/logs", s.buildLogs)
	mux.HandleFunc("PUT "+uploadPath+"{template}/{hash}", s.uploadFiles)
	// E2B's first way to build: the client builds an image with Docker and pushes it
	// to E2B's registry. Its CLI left it in version 2; this server has no registry.
	for _, p := range []string{"POST /templates", "POST /templates/{template}", "POST /templates/{template}/builds/{build}"} {
		handle(p, func(w http.ResponseWriter, _ *http.Request, _ auth.Principal) error {
			reply(w, http.StatusGone, map[string]any{"code": http.StatusGone, "message": "this is E2B's first build system, for which the client pushes an image that Docker built; use \"e2b template create\" or Template.build of the SDK, which need no Docker"})
			return nil
		})
	}
}

// noRoute answers as for a path without a route.
func noRoute(w http.ResponseWriter, r *http.Request) error {
	reply(w, http.StatusNotFound, map[string]any{"code": http.StatusNotFound, "message": r.Method + " " + r.URL.Path + " is not a route of this server"})
	return nil
}

// templateStatus returns the status of an error of templates, or 0 for other errors.
func templateStatus(err error) int {
	for _, c := range []struct {
		err    error
		status int
	}{
		{errUpload, http.StatusForbidden},
		{build.ErrNoBuild, http.StatusBadRequest}, // as in E2B
		{build.ErrForbidden, http.StatusForbidden},
		{build.ErrNotWaiting, http.StatusBadRequest},
		{build.ErrInvalid, http.StatusBadRequest},
		{build.ErrBusy, http.StatusBadRequest}, // as in E2B
		{build.ErrFull, http.StatusTooManyRequests},
		{build.ErrTooLarge, http.StatusRequestEntityTooLarge},
		{build.ErrNotFound, http.StatusNotFound},
		{registry.ErrInvalid, http.StatusBadRequest}, // of an import
		{registry.ErrFull, http.StatusInsufficientStorage},
	} {
		if errors.Is(err, c.err) {
			return c.status
		}
	}
	return 0
}

// errNoTemplates means that this server builds no templates.
var errNoTemplates = fmt.Errorf("%w: this server builds no templates", errRequest)

// builds returns the templates of projects, or an error if the server has none.
func (s *Server) builds() (*build.Service, error) {
	if s.conf.Builds == nil {
		return nil, errNoTemplates
	}
	return s.conf.Builds, nil
}

// These bound a request for a build. Package build bounds the rest.
const (
	maxTags      = 64
	maxArguments = 1000
)

// newTemplate is the body of a request for a build in E2B's v2 and v3.
type newTemplate struct {
	Name          string   `json:"name"`  // v3: may have a tag after a colon
	Alias         string   `json:"alias"` // older name of Name
	Tags          []string `json:"tags"`
	TeamID        string   `json:"teamID"` // of the caller, who has only one team
	CPUCount      *int64   `json:"cpuCount"`
	MemoryMB      *int64   `json:"memoryMB"`
	MinFreeDiskMB *int64   `json:"minFreeDiskMb"`
}

// request returns the body as a request of package build.
func (b *newTemplate) request(who auth.Principal) (build.Request, error) {
	bad := func(format string, a ...any) (build.Request, error) {
		return build.Request{}, fmt.Errorf("%w: "+format, append([]any{errRequest}, a...)...)
	}
	if b.TeamID != "" && b.TeamID != who.Project {
		return build.Request{}, fmt.Errorf("teamID: the key belongs to another team: %w", auth.ErrForbidden)
	}
	q := build.Request{Name: b.Name, Tags: b.Tags}
	if q.Name == "" {
		q.Name = b.Alias
	}
	if q.Name == "" {
		return bad("name: want the name of the template")
	}
	if len(b.Tags) > maxTags {
		return bad("tags: has %d tags, at most %d are allowed", len(b.Tags), maxTags)
	}
	// Zero means the default in package build, which has the other limits.
	for field, n := range map[string]*int64{"cpuCount": b.CPUCount, "memoryMB": b.MemoryMB} {
		if n != nil && (*n < 1 || *n > 1<<30) {
			return bad("%s: want a number above 0", field)
		}
	}
	if n := b.CPUCount; n != nil {
		q.CPUs = float64(*n)
	}
	if n := b.MemoryMB; n != nil {
		q.MemoryMB = *n
	}
	if n := b.MinFreeDiskMB; n != nil {
		q.DiskMB = *n
	}
	return q, nil
}

// requestBuild creates a build that waits for its definition.
func (s *Server) requestBuild(r *http.Request, who auth.Principal) (build.Template, build.Build, error) {
	var b newTemplate
	if err := decode(r, &b); err != nil {
		return build.Template{}, build.Build{}, err
	}
	q, err := b.request(who)
	if err != nil {
		return build.Template{}, build.Build{}, err
	}
	bs, err := s.builds()
	if err != nil {
		return build.Template{}, build.Build{}, err
	}
	return bs.Create(r.Context(), who, q)
}

// createTemplate is E2B's v3 of the request for a build.
func (s *Server) createTemplate(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	t, b, err := s.requestBuild(r, who)
	if err != nil {
		return err
	}
	reply(w, http.StatusAccepted, map[string]any{
		"templateID": t.ID, "buildID": b.ID, "public": t.Public,
		"aliases": orEmpty(t.Names), "names": fullNames(t), "tags": orEmpty(b.Tags),
	})
	return nil
}

// createTemplateV2 is the older version, which answers with the whole template.
func (s *Server) createTemplateV2(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	t, b, err := s.requestBuild(r, who)
	if err != nil {
		return err
	}
	m := s.templateInfo(t)
	m["buildID"] = b.ID
	reply(w, http.StatusAccepted, m)
	return nil
}

// fullNames returns the names of a template with its team's name.
func fullNames(t build.Template) []string {
	return each(t.Names, func(n string) string { return t.Team + "/" + n })
}

// noBuild stands for the build of a template that has no finished one.
const noBuild = "00000000-0000-0000-0000-000000000000"

// sizes returns what sandboxes of a template get, in JSON. Zero means the server's.
func (s *Server) sizes(cpus float64, memoryMB, diskMB int64) map[string]any {
	return map[string]any{
		"cpuCount": max(1, int64(cmp.Or(cpus, s.conf.CPUs))), "memoryMB": cmp.Or(memoryMB, s.conf.MemoryMB), "diskSizeMB": cmp.Or(diskMB, s.conf.DiskMB),
	}
}

// templateInfo returns a template in JSON.
func (s *Server) templateInfo(t build.Template) map[string]any {
	m := map[string]any{
		"templateID": t.ID, "buildID": noBuild, "buildStatus": t.State,
		"public": t.Public, "aliases": orEmpty(t.Names), "names": fullNames(t),
		"createdAt": timeOf(t.Created), "updatedAt": timeOf(t.Updated), "createdBy": nil,
		"lastSpawnedAt": timeOf(t.Spawned), "spawnCount": t.Spawns, "buildCount": t.Builds, "envdVersion": guestVersion,
	}
	maps.Copy(m, s.sizes(t.CPUs, t.MemoryMB, t.DiskMB))
	if t.Build != "" {
		m["buildID"] = t.Build
	}
	return m
}

// timeOf returns a time in JSON; the zero time is null.
func timeOf(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UTC().Format(time.RFC3339Nano)
}

// listTemplates answers with all templates of the project on one page: E2B's v1, whose
// callers know no cursor.
func (s *Server) listTemplates(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	all, err := s.ownTemplates(r, who)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, each(all, s.templateInfo))
	return nil
}

// ownTemplates returns the templates of the caller's project, newest first.
func (s *Server) ownTemplates(r *http.Request, who auth.Principal) ([]build.Template, error) {
	if team := r.URL.Query().Get("teamID"); team != "" && team != who.Project {
		return nil, fmt.Errorf("teamID: the key belongs to another team: %w", auth.ErrForbidden)
	}
	bs, err := s.builds()
	if err != nil {
		return nil, err
	}
	return bs.List(r.Context(), who)
}

// listTemplatesV2 answers with one page of the project's templates, newest first.
func (s *Server) listTemplatesV2(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p, err := pageOf(r.URL.Query())
	if err != nil {
		return err
	}
	all, err := s.ownTemplates(r, who)
	if err != nil {
		return err
	}
	page := onPage(w, p, all, func(t build.Template) string { return cursor(t.Created, t.ID) })
	reply(w, http.StatusOK, each(page, s.templateInfo))
	return nil
}

// onPage returns the entries of one page of all, which is sorted with the newest first,
// and tells the caller whether there are more.
func onPage[T any](w http.ResponseWriter, p page, all []T, at func(T) string) []T {
	var out []T
	for _, t := range all {
		if p.after != "" && at(t) >= p.after {
			continue
		}
		if len(out) == p.limit {
			setNextToken(w, at(out[len(out)-1]))
			break
		}
		out = append(out, t)
	}
	return out
}

// getTemplate answers with a template and a page of its builds, newest first.
func (s *Server) getTemplate(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p, err := pageOf(r.URL.Query())
	if err != nil {
		return err
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	t, err := bs.Get(r.Context(), who, r.PathValue("template"))
	if err != nil {
		return err
	}
	builds, err := bs.Builds(r.Context(), who, r.PathValue("template"))
	if err != nil {
		return err
	}
	m := s.templateInfo(t)
	for _, k := range []string{"buildID", "buildStatus", "cpuCount", "memoryMB", "diskSizeMB", "createdBy", "buildCount", "envdVersion"} {
		delete(m, k)
	}
	m["builds"] = each(onPage(w, p, builds, func(b build.Build) string { return cursor(b.Created, b.ID) }), s.buildInfo)
	reply(w, http.StatusOK, m)
	return nil
}

// buildInfo returns a build in JSON.
func (s *Server) buildInfo(b build.Build) map[string]any {
	updated := b.Created
	for _, t := range []time.Time{b.Started, b.Ended} {
		if t.After(updated) {
			updated = t
		}
	}
	m := map[string]any{
		"buildID": b.ID, "status": b.State, "createdAt": timeOf(b.Created), "updatedAt": timeOf(updated), "envdVersion": guestVersion,
	}
	maps.Copy(m, s.sizes(b.CPUs, b.MemoryMB, b.DiskMB))
	if !b.Ended.IsZero() {
		m["finishedAt"] = timeOf(b.Ended)
	}
	return m
}

// publishTemplate sets whether other projects may start sandboxes from a template.
func (s *Server) publishTemplate(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Public *bool `json:"public"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	var t build.Template
	if b.Public == nil { // an empty request changes nothing, as in E2B
		t, err = bs.Get(r.Context(), who, r.PathValue("template"))
	} else {
		t, err = bs.SetPublic(r.Context(), who, r.PathValue("template"), *b.Public)
	}
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, map[string]any{"names": fullNames(t)})
	return nil
}

// deleteTemplate removes a template of the project, or a snapshot, which is a template
// in E2B's API. The server's own templates cannot be removed.
func (s *Server) deleteTemplate(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ctx, name := r.Context(), r.PathValue("template")
	err := build.ErrNotFound
	// The names of snapshots have a tag. A template and a snapshot may have one name.
	if bs := s.conf.Builds; bs != nil && !strings.Contains(name, ":") {
		err = bs.Delete(ctx, who, name)
	}
	if errors.Is(err, build.ErrNotFound) {
		var n sandbox.Snapshot
		if n, err = s.fleet.FindSnapshot(ctx, who, name); err == nil {
			err = s.fleet.DeleteSnapshot(ctx, who, n.ID)
		}
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// alias answers whether a template of that name exists.
func (s *Server) alias(w http.ResponseWriter, r *http.Request, who auth.Principal, name string) error {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	// A name without a tag exists also before its first build is ready.
	at, err := bs.Resolve(r.Context(), who, name)
	if err == nil && at.Template == nil { // the server's own, for everybody
		reply(w, http.StatusOK, map[string]any{"templateID": at.ID, "public": true})
		return nil
	}
	if err != nil && strings.Contains(name, ":") {
		return err
	}
	t, err := bs.Get(r.Context(), who, name)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, map[string]any{"templateID": t.ID, "public": t.Public})
	return nil
}

// A startedBuild is the body of the request that starts a build. Fields of other names
// are ignored in steps, where the SDKs keep notes of their own, and in no other place.
type startedBuild struct {
	FromImage    string          `json:"fromImage"`
	FromTemplate string          `json:"fromTemplate"`
	Registry     json.RawMessage `json:"fromImageRegistry"`
	StartCmd     string          `json:"startCmd"`
	ReadyCmd     string          `json:"readyCmd"`
	Force        bool            `json:"force"`
	Steps        []buildStep     `json:"steps"`
}

// A buildStep is one step of a build.
type buildStep struct {
	Type      string   `json:"type"`
	Args      []string `json:"args"`
	FilesHash string   `json:"filesHash"`
	Force     bool     `json:"force"`
}

// UnmarshalJSON implements [json.Unmarshaler]. It ignores unknown fields also where the
// surrounding decoder does not.
func (b *buildStep) UnmarshalJSON(text []byte) error {
	type plain buildStep
	return json.Unmarshal(text, (*plain)(b))
}

// registryLogin is E2B's object fromImageRegistry.
type registryLogin struct {
	Type     string `json:"type"`
	Username string `json:"username"`
	Password string `json:"password"`

	AWSKeyID  string `json:"awsAccessKeyId"`
	AWSSecret string `json:"awsSecretAccessKey"`
	AWSRegion string `json:"awsRegion"`

	GCPKey string `json:"serviceAccountJson"`
}

// credentials returns the credentials for the image's registry. Errors do not repeat
// any value.
func (b *startedBuild) credentials() (c registry.Credentials, err error) {
	if !given(b.Registry) {
		return c, nil
	}
	var l registryLogin
	if json.Unmarshal(b.Registry, &l) != nil {
		return c, fmt.Errorf("%w: fromImageRegistry: want an object of strings", errRequest)
	}
	missing := func(fields ...string) error {
		return fmt.Errorf("%w: fromImageRegistry: type %q needs %s", errRequest, l.Type, strings.Join(fields, ", "))
	}
	switch l.Type {
	case "registry":
		if l.Username == "" || l.Password == "" {
			return c, missing("username", "password")
		}
		return registry.Credentials{Username: l.Username, Password: l.Password}, nil
	case "aws":
		if l.AWSKeyID == "" || l.AWSSecret == "" || l.AWSRegion == "" {
			return c, missing("awsAccessKeyId", "awsSecretAccessKey", "awsRegion")
		}
		return registry.Credentials{AWSKeyID: l.AWSKeyID, AWSSecret: l.AWSSecret, AWSRegion: l.AWSRegion}, nil
	case "gcp":
		if l.GCPKey == "" {
			return c, missing("serviceAccountJson")
		}
		return registry.Credentials{GCPKey: l.GCPKey}, nil
	}
	return c, fmt.Errorf("%w: fromImageRegistry.type: want registry, aws or gcp", errRequest)
}

// definition returns the body as a definition of package build.
func (b *startedBuild) definition() (build.Definition, error) {
	bad := func(format string, a ...any) (build.Definition, error) {
		return build.Definition{}, fmt.Errorf("%w: "+format, append([]any{errRequest}, a...)...)
	}
	c, err := b.credentials()
	if err != nil {
		return build.Definition{}, err
	}
	// E2B's own base image, which SDKs name if nothing else is given.
	switch strings.TrimPrefix(b.FromImage, "docker.io/") {
	case "e2bdev/base", "e2bdev/base:latest":
		if b.FromTemplate == "" && c == (registry.Credentials{}) {
			b.FromImage, b.FromTemplate = "", "base"
		}
	}
	d := build.Definition{
		FromImage: b.FromImage, Credentials: c, FromTemplate: b.FromTemplate, StartCmd: b.StartCmd, ReadyCmd: b.ReadyCmd, Force: b.Force,
	}
	for i, st := range b.Steps {
		if len(st.Args) > maxArguments {
			return bad("steps[%d].args: has %d arguments, at most %d are allowed", i, len(st.Args), maxArguments)
		}
		d.Steps = append(d.Steps, build.Step{Type: st.Type, Args: st.Args, FilesHash: st.FilesHash, Force: st.Force})
	}
	return d, nil
}

// startBuild gives a waiting build its definition and starts it.
func (s *Server) startBuild(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b startedBuild
	if err := decode(r, &b); err != nil {
		return err
	}
	d, err := b.definition()
	if err != nil {
		return err
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	if err := bs.Start(r.Context(), who, r.PathValue("template"), r.PathValue("build"), d); err != nil {
		return err
	}
	// The SDKs read a body unless they are told that it is empty.
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusAccepted)
	return nil
}

// logsOf returns what the query selects of a build's log.
func logsOf(q url.Values) (l build.Logs, err error) {
	offset, err := number(q, "logsOffset", 0, 0, 1<<31-1)
	if err != nil {
		return l, err
	}
	limit, err := number(q, "limit", 100, 0, 100)
	if err != nil {
		return l, err
	}
	switch v := q.Get("level"); v {
	case "", "debug", "info", "warn", "error":
		l.Level = v
	default:
		return l, fmt.Errorf("%w: level: want debug, info, warn or error", errRequest)
	}
	l.Offset, l.Limit = int(offset), int(limit)
	return l, nil
}

// buildLine returns a line of a build's log in JSON.
func buildLine(e build.Entry) map[string]any {
	m := map[string]any{"timestamp": e.Time.UTC().Format(time.RFC3339Nano), "level": e.Level, "message": e.Message}
	if e.Step != "" {
		m["step"] = e.Step
	}
	return m
}

// buildStatus answers with the state of a build and a part of its log.
func (s *Server) buildStatus(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	l, err := logsOf(r.URL.Query())
	if err != nil {
		return err
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	st, err := bs.Status(r.Context(), who, r.PathValue("template"), r.PathValue("build"), l)
	if err != nil {
		return noSuchBuild(r, err)
	}
	if r.URL.Query().Get("limit") == "0" {
		st.Entries = nil
	}
	m := map[string]any{
		"templateID": st.Template, "buildID": st.Build, "status": st.State,
		"logs": []string{}, "logEntries": each(st.Entries, buildLine), // logs is of E2B's first build system
	}
	if f := st.Failure; f != nil {
		reason := map[string]any{"message": f.Message, "logEntries": each(f.Entries, buildLine)}
		if f.Step != "" {
			reason["step"] = f.Step
		}
		m["reason"] = reason
	}
	reply(w, http.StatusOK, m)
	return nil
}

// noSuchBuild gives an error about an unknown build E2B's text.
func noSuchBuild(r *http.Request, err error) error {
	if errors.Is(err, build.ErrNoBuild) {
		return fmt.Errorf("%w: Build '%s' not found", errRequest, r.PathValue("build"))
	}
	return err
}

// buildLogs answers with a part of a build's log, from a time on.
func (s *Server) buildLogs(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q := r.URL.Query()
	l, err := logsOf(q)
	if err != nil {
		return err
	}
	since, err := number(q, "cursor", 0, 0, 1<<52)
	if err != nil {
		return err
	}
	var backward bool
	switch q.Get("direction") {
	case "", "forward":
	case "backward":
		backward = true
	default:
		return fmt.Errorf("%w: direction: want forward or backward", errRequest)
	}
	switch q.Get("source") {
	case "", "temporary", "persistent": // all lines are kept in one place
	default:
		return fmt.Errorf("%w: source: want temporary or persistent", errRequest)
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	out, err := selectLogs(since, q.Has("cursor"), backward, l, func(l build.Logs) ([]build.Entry, error) {
		st, err := bs.Status(r.Context(), who, r.PathValue("template"), r.PathValue("build"), l)
		return st.Entries, err
	})
	if err != nil {
		return noSuchBuild(r, err)
	}
	reply(w, http.StatusOK, map[string]any{"logs": each(out, buildLine)})
	return nil
}

// selectLogs returns up to l.Limit entries from the time since on, in milliseconds, or
// backwards from it. Read returns a part of the whole log.
func selectLogs(since int64, bounded, backward bool, l build.Logs, read func(build.Logs) ([]build.Entry, error)) ([]build.Entry, error) {
	limit := l.Limit
	if limit == 0 {
		return nil, nil
	}
	var out []build.Entry
	for l.Offset, l.Limit = 0, 100; ; l.Offset += 100 {
		part, err := read(l)
		if err != nil {
			return nil, err
		}
		for _, e := range part {
			at := e.Time.UnixMilli()
			if bounded && (backward && at > since || !backward && at < since) {
				continue
			}
			out = append(out, e)
			if backward && len(out) > limit {
				out = out[1:]
			}
			if !backward && len(out) == limit {
				return out, nil
			}
		}
		if len(part) < 100 {
			break
		}
	}
	if backward {
		for i, j := 0, len(out)-1; i < j; i, j = i+1, j-1 {
			out[i], out[j] = out[j], out[i]
		}
	}
	return out, nil
}

// filesHash is the digest of the files of a step, as the SDKs compute it.
var filesHash = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[0-9a-f]{64}$`) })
