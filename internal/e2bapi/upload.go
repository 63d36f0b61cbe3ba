package e2bapi

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
)

// uploadPath is where the files of templates are uploaded. The SDKs send no key there:
// E2B's server answers with a URL of an object store.
const uploadPath = "/templatefiles/"

// uploadTime is how long a URL for an upload may be used. The SDKs upload for up to an
// hour.
const uploadTime = time.Hour

// errUpload means that the signature of an upload is wrong or has expired.
var errUpload = errors.New("the signature of this upload URL is missing, wrong or expired; ask for a new URL")

// An uploader signs URLs for uploads.
type uploader struct{ key []byte }

// newUploader returns an uploader with a key that follows from the server's. Without
// one the URLs are good for this process alone.
func newUploader(key []byte) *uploader {
	if len(key) == 0 {
		key = []byte(rand.Text())
	}
	m := hmac.New(sha256.New, key)
	m.Write([]byte("postern template uploads v1"))
	return &uploader{m.Sum(nil)}
}

// sign returns the signature of an upload of the files with this hash. The URL opens
// only this: one project's files of one template with one hash, until it expires.
func (u *uploader) sign(project, template, hash string, expires int64) string {
	m := hmac.New(sha256.New, u.key)
	for _, s := range []string{project, template, hash} {
		fmt.Fprintf(m, "%d:%s", len(s), s) // no two lists of values have the same text
	}
	fmt.Fprintf(m, "%d", expires)
	return hex.EncodeToString(m.Sum(nil))
}

// templateFiles answers whether the files with a hash are here, and where to upload
// them. The URL is there in both cases: the SDK's forceUpload needs it.
func (s *Server) templateFiles(w http.ResponseWriter, r *http.Request, who auth.Principal, template, hash string) error {
	if !filesHash().MatchString(hash) {
		return fmt.Errorf("%w: Invalid files hash", errRequest)
	}
	bs, err := s.builds()
	if err != nil {
		return err
	}
	present, err := bs.FilePresent(r.Context(), who, template, hash)
	if err != nil {
		return err
	}
	expires := time.Now().Add(uploadTime).Unix()
	at := url.URL{Scheme: "http", Host: r.Host, Path: uploadPath + template + "/" + hash}
	if r.TLS != nil || s.conf.HTTPS {
		at.Scheme = "https"
	}
	at.RawQuery = url.Values{
		"project": {who.Project}, "expires": {strconv.FormatInt(expires, 10)},
		"signature": {s.uploads.sign(who.Project, template, hash, expires)},
	}.Encode()
	w.Header().Set("Cache-Control", "no-store")
	reply(w, http.StatusCreated, map[string]any{"present": present, "url": at.String()})
	return nil
}

// uploadFiles takes an archive for a step. Whoever has the URL may upload.
func (s *Server) uploadFiles(w http.ResponseWriter, r *http.Request) {
	err := s.limitUploads(r)
	if err == nil {
		err = s.upload(w, r)
	}
	if errors.Is(err, errUpload) {
		s.limits.foundNothing(r)
	}
	if err != nil {
		// The rest of a refused body is not read, however long it is.
		w.Header().Set("Connection", "close")
		s.fail(w, r, err)
	}
}

// limitUploads refuses an address that has tried too many signatures.
func (s *Server) limitUploads(r *http.Request) error {
	if wait := s.limits.unknown.take(addressOf(r), 0, time.Now()); wait > 0 {
		return &limitError{"uploads with wrong signatures from this address", wait}
	}
	return nil
}

func (s *Server) upload(w http.ResponseWriter, r *http.Request) error {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	q, template, hash := r.URL.Query(), r.PathValue("template"), r.PathValue("hash")
	expires, err := strconv.ParseInt(q.Get("expires"), 10, 64)
	if err != nil || expires < time.Now().Unix() || !same(s.uploads.sign(q.Get("project"), template, hash, expires), strings.ToLower(q.Get("signature"))) {
		return errUpload
	}
	if r.ContentLength < 0 {
		reply(w, http.StatusLengthRequired, map[string]any{"code": http.StatusLengthRequired, "message": "header Content-Length is missing: the size of the archive must be known before the upload"})
		return nil
	}
	body := &progressReader{r: r.Body, rc: http.NewResponseController(w)}
	who := auth.Principal{Kind: auth.Project, ID: q.Get("project"), Project: q.Get("project")} // as the signature says
	err = bs.Upload(r.Context(), who, template, hash, r.ContentLength, body)
	_ = body.rc.SetReadDeadline(time.Time{})
	switch {
	case err != nil && body.err != nil && !errors.Is(body.err, io.EOF):
		return fmt.Errorf("%w: body: the upload ended early", errRequest)
	case err != nil:
		return err
	}
	w.WriteHeader(http.StatusOK)
	return nil
}
