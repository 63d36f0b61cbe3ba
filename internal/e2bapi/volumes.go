package e2bapi

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/volume"
)

// volumeRoutes adds the routes for volumes and, for callers that mayUse accepts,
// for their content.
func (s *Server) volumeRoutes(mux *http.ServeMux, handle func(string, func(http.ResponseWriter, *http.Request, auth.Principal) error), mayUse func(r *http.Request, id string) error) {
	handle("POST /volumes", s.createVolume)
	handle("GET /volumes", s.listVolumes)
	handle("GET /volumes/{id}", s.getVolume)
	handle("DELETE /volumes/{id}", s.deleteVolume)
	content := func(pattern string, h func(w http.ResponseWriter, r *http.Request, c *volume.Content) error) {
		method, what, _ := strings.Cut(pattern, " ")
		mux.HandleFunc(method+" /volumecontent/{id}/"+what, func(w http.ResponseWriter, r *http.Request) {
			if err := s.withContent(w, r, mayUse, h); err != nil {
				s.fail(w, r, err)
			}
		})
	}
	content("GET path", s.statPath)
	content("PATCH path", s.setPath)
	content("DELETE path", s.removePath)
	content("GET dir", s.listDir)
	content("POST dir", s.makeDir)
	content("GET file", s.readFile)
	content("PUT file", s.writeFile)
}

// errToken means that a request for the content of a volume has no valid token.
var errToken = errors.New("the volume's token is missing or not valid")

// byToken accepts requests with the volume's token.
func (s *Server) byToken(r *http.Request, id string) error {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok || s.conf.Volumes == nil {
		return errToken
	}
	_, err := s.conf.Volumes.CheckToken(r.Context(), id, auth.Secret(token))
	if errors.Is(err, auth.ErrUnauthenticated) {
		return errToken
	}
	return err
}

// byOwner accepts requests of the project that owns the volume.
func (s *Server) byOwner(who func(*http.Request) (auth.Principal, error)) func(*http.Request, string) error {
	return func(r *http.Request, id string) error {
		p, err := who(r)
		if err != nil {
			return err
		}
		vs, err := s.volumes()
		if err != nil {
			return err
		}
		_, err = vs.Get(r.Context(), p, id)
		return err
	}
}

// volumes returns the volumes, or an error if the server has none.
func (s *Server) volumes() (*volume.Store, error) {
	if s.conf.Volumes == nil {
		return nil, volume.ErrUnsupported
	}
	return s.conf.Volumes, nil
}

// withContent opens the content of the volume in r's path for h.
func (s *Server) withContent(w http.ResponseWriter, r *http.Request, mayUse func(*http.Request, string) error, h func(http.ResponseWriter, *http.Request, *volume.Content) error) error {
	if err := mayUse(r, r.PathValue("id")); err != nil {
		return err
	}
	vs, err := s.volumes()
	if err != nil {
		return err
	}
	c, err := vs.Content(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	defer c.Close()
	return h(w, r, c)
}

// volumeStatus returns the status of an error of volumes, or 0 for other errors.
func volumeStatus(err error) int {
	for _, c := range []struct {
		err    error
		status int
	}{
		{errToken, http.StatusUnauthorized},
		{volume.ErrNotFound, http.StatusNotFound},
		{volume.ErrNoPath, http.StatusNotFound},
		{volume.ErrInvalid, http.StatusBadRequest},
		{volume.ErrExists, http.StatusConflict},
		{volume.ErrInUse, http.StatusConflict},
		{volume.ErrTooMany, http.StatusForbidden},
		{volume.ErrFull, http.StatusInsufficientStorage},
		{volume.ErrUnsupported, http.StatusNotImplemented},
	} {
		if errors.Is(err, c.err) {
			return c.status
		}
	}
	return 0
}

// createVolume creates a volume and answers with its token.
func (s *Server) createVolume(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Name string `json:"name"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	vs, err := s.volumes()
	if err != nil {
		return err
	}
	v, err := vs.Create(r.Context(), who, b.Name)
	if errors.Is(err, volume.ErrExists) {
		return fmt.Errorf("%w: %s", errRequest, err.Error()) // without %w: the status is 400, as in E2B
	}
	if err != nil {
		return err
	}
	reply(w, http.StatusCreated, s.withToken(v))
	return nil
}

// volumeInfo returns a volume in JSON. It has more fields than E2B's, for the
// operator.
func volumeInfo(v volume.Volume) map[string]any {
	return map[string]any{
		"volumeID": v.ID, "name": v.Name,
		"createdAt": v.Created.Format(time.RFC3339Nano), "sizeMB": v.SizeMB, "usedMB": v.UsedMB,
	}
}

// withToken returns a volume in JSON with the token for its content.
func (s *Server) withToken(v volume.Volume) map[string]any {
	m := volumeInfo(v)
	m["token"] = s.conf.Volumes.Token(v.ID).Reveal()
	if s.conf.Domain != "" {
		m["domain"] = s.conf.Domain
	}
	return m
}

// listVolumes answers with the volumes of the caller's project.
func (s *Server) listVolumes(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	vs, err := s.volumes()
	if err != nil {
		return err
	}
	all, err := vs.List(r.Context(), who)
	if err != nil {
		return err
	}
	out := []map[string]any{}
	for _, v := range all {
		out = append(out, volumeInfo(v))
	}
	reply(w, http.StatusOK, out)
	return nil
}

func (s *Server) getVolume(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	vs, err := s.volumes()
	if err != nil {
		return err
	}
	v, err := vs.Get(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, s.withToken(v))
	return nil
}

// deleteVolume removes a volume that no sandbox uses.
func (s *Server) deleteVolume(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	vs, err := s.volumes()
	if err != nil {
		return err
	}
	if err := vs.Delete(r.Context(), who, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// entryStat is E2B's description of a file or directory.
type entryStat struct {
	Name   string      `json:"name"`
	Type   volume.Kind `json:"type"`
	Path   string      `json:"path"`
	Size   int64       `json:"size"`
	Mode   uint32      `json:"mode"`
	UID    uint32      `json:"uid"`
	GID    uint32      `json:"gid"`
	ATime  time.Time   `json:"atime"`
	MTime  time.Time   `json:"mtime"`
	CTime  time.Time   `json:"ctime"`
	Target string      `json:"target,omitempty"`
}

// statOf returns an entry in E2B's form.
func statOf(e volume.Entry) entryStat {
	return entryStat{e.Name, e.Kind, e.Path, e.Size, e.Mode, e.UID, e.GID, e.Access, e.Modify, e.Change, e.Target}
}

// attributes parses uid, gid, mode and force from the query.
func attributes(r *http.Request) (a volume.Attributes, force bool, err error) {
	q := r.URL.Query()
	for _, f := range []struct {
		name string
		to   **uint32
	}{{"uid", &a.UID}, {"gid", &a.GID}, {"mode", &a.Mode}} {
		if !q.Has(f.name) {
			continue
		}
		n, err := strconv.ParseUint(q.Get(f.name), 10, 32)
		if err != nil {
			return a, false, fmt.Errorf("%w: %s: want a number from 0 to 4294967295", errRequest, f.name)
		}
		v := uint32(n)
		*f.to = &v
	}
	if q.Has("force") {
		if force, err = strconv.ParseBool(q.Get("force")); err != nil {
			return a, false, fmt.Errorf("%w: force: want true or false", errRequest)
		}
	}
	return a, force, nil
}

func (s *Server) statPath(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	e, err := c.Stat(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, statOf(e))
	return nil
}

// setPath changes owner or mode of a file or directory.
func (s *Server) setPath(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	var b struct{ UID, GID, Mode *uint32 }
	if err := readBody(w, r); err != nil {
		return err
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	e, err := c.SetAttributes(r.URL.Query().Get("path"), volume.Attributes{UID: b.UID, GID: b.GID, Mode: b.Mode})
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, statOf(e))
	return nil
}

func (s *Server) removePath(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	if err := c.Remove(r.Context(), r.URL.Query().Get("path")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// listDir answers with the entries of a directory, down to the depth in the query.
func (s *Server) listDir(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	depth := 1
	if q := r.URL.Query(); q.Has("depth") {
		var err error
		if depth, err = strconv.Atoi(q.Get("depth")); err != nil {
			return fmt.Errorf("%w: depth: want a number", errRequest)
		}
	}
	es, err := c.List(r.Context(), r.URL.Query().Get("path"), depth)
	if err != nil {
		return err
	}
	// Written entry by entry: the listing of a directory that a sandbox filled has
	// up to 20 MB of JSON.
	w.Header().Set("Content-Type", "application/json")
	rc := http.NewResponseController(w)
	_ = rc.SetWriteDeadline(time.Now().Add(stalled))
	out := bufio.NewWriter(w)
	sep := byte('[')
	for _, e := range es {
		b, err := json.Marshal(statOf(e))
		if err != nil { // ext4 has no times with a year of five digits
			b = []byte("null")
		}
		_ = out.WriteByte(sep)
		_, _ = out.Write(b)
		sep = ','
	}
	if len(es) == 0 {
		_ = out.WriteByte('[')
	}
	_ = out.WriteByte(']')
	if err := out.Flush(); err != nil { // the client has disconnected
		s.log.DebugContext(r.Context(), "send a listing of a volume", "volume", r.PathValue("id"), "err", err)
		return nil
	}
	_ = rc.SetWriteDeadline(time.Time{})
	return nil
}

// makeDir creates a directory; with force also its parents.
func (s *Server) makeDir(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	a, force, err := attributes(r)
	if err != nil {
		return err
	}
	e, err := c.MakeDir(r.URL.Query().Get("path"), a, force)
	if err != nil {
		return err
	}
	reply(w, http.StatusCreated, statOf(e))
	return nil
}

// stalled is how long a transfer may make no progress. The SDK sets no limit of its
// own on a streamed upload.
const stalled = 2 * time.Minute

// readFile sends the content of a file.
func (s *Server) readFile(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	f, e, err := c.Open(r.URL.Query().Get("path"))
	if err != nil {
		return err
	}
	defer f.Close()
	// A file that a sandbox wrote must not become a page of this server in a
	// browser.
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(e.Size, 10))
	w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(w)
	for left := e.Size; left > 0; {
		// Not every ResponseWriter has deadlines, for example a test's recorder.
		_ = rc.SetWriteDeadline(time.Now().Add(stalled))
		n, err := io.CopyN(w, f, min(left, 4<<20))
		left -= n
		if err != nil {
			// The status has been sent: the client notices that the body is too
			// short.
			s.log.DebugContext(r.Context(), "send a file of a volume", "volume", r.PathValue("id"), "err", err)
			return nil
		}
	}
	_ = rc.SetWriteDeadline(time.Time{})
	return nil
}

// writeFile writes a file from the request body. The file appears when it is
// complete.
//
// It may fail while the client still sends. A connection that is closed before everything
// was read is reset, and then the client may lose the answer (RFC 9112, section 9.6). So
// the rest is read for some time, and dropped.
func (s *Server) writeFile(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex() // HTTP/2 is always full duplex
	if err := s.writeUpload(w, r, c); err != nil {
		w.Header().Set("Connection", "close")
		s.fail(w, r, err)
		_ = rc.Flush()
		_ = rc.SetReadDeadline(time.Now().Add(dropTime))
		_, _ = io.Copy(io.Discard, r.Body)
	}
	return nil
}

// dropTime is how long the rest of a refused upload is read.
const dropTime = 10 * time.Second

func (s *Server) writeUpload(w http.ResponseWriter, r *http.Request, c *volume.Content) error {
	a, force, err := attributes(r)
	if err != nil {
		return err
	}
	body := &progressReader{r: r.Body, rc: http.NewResponseController(w)}
	e, err := c.Write(r.URL.Query().Get("path"), body, a, force)
	_ = body.rc.SetReadDeadline(time.Time{})
	if body.err != nil && !errors.Is(body.err, io.EOF) && err != nil {
		return fmt.Errorf("%w: body: the upload ended early", errRequest)
	}
	if err != nil {
		return err
	}
	reply(w, http.StatusCreated, statOf(e))
	return nil
}

// progressReader is a request body that may take any time as long as it makes progress.
type progressReader struct {
	r   io.Reader
	rc  *http.ResponseController
	err error // of the last Read
}

// Read implements [io.Reader]. Each read gets a new deadline.
func (p *progressReader) Read(b []byte) (n int, err error) {
	_ = p.rc.SetReadDeadline(time.Now().Add(stalled))
	n, p.err = p.r.Read(b)
	return n, p.err
}
