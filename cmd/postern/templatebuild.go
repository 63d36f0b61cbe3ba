package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"postern/internal/dockerfile"
)

// maxCopy is the maximum size of the files of one COPY, in bytes. The server's limit is the
// same, for the archive.
const maxCopy = 1 << 30

// readDefinition reads a file of at most maxConfig bytes: a Dockerfile, or JSON with the
// fields of E2B's request for a build.
func readDefinition(file string) (map[string]any, error) {
	info, err := os.Stat(file)
	if err == nil && info.Size() > maxConfig {
		err = fmt.Errorf("%s has more than %d bytes", file, maxConfig)
	}
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(strings.TrimSpace(string(b)), "{") {
		var d map[string]any
		if err := json.Unmarshal(b, &d); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		return d, nil
	}
	f, err := dockerfile.Parse(string(b))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	var steps []any
	for _, s := range f.Steps {
		steps = append(steps, map[string]any{"type": s.Type, "args": s.Args})
	}
	d := map[string]any{"fromImage": f.From, "steps": steps}
	if f.StartCmd != "" {
		d["startCmd"] = f.StartCmd
	}
	return d, nil
}

// A copied is the archive of a step that copies files.
type copied struct {
	source, hash string
	file         *os.File // without a name
	size         int64
}

// close frees the archive's space.
func (c *copied) close() { _ = c.file.Close() }

// packCopies packs the files of the steps that copy some, and sets their hashes in the
// definition. Steps that have a hash are left alone: their files were uploaded before. The
// caller closes the archives, also after an error.
func packCopies(ctx context.Context, d map[string]any, dir, file string) (all []copied, err error) {
	steps, _ := d["steps"].([]any)
	var files *dockerfile.Context
	for i, s := range steps {
		step, _ := s.(map[string]any)
		kind, _ := step["type"].(string)
		if k := strings.ToUpper(kind); k != "COPY" && k != "ADD" || step["filesHash"] != nil {
			continue
		}
		args, err := stringsOf(step["args"])
		if err != nil || len(args) < 2 {
			return all, fmt.Errorf("%s: step %d: args: want a source and a target", file, i+1)
		}
		if args[0], err = dockerfile.Source(args[0]); err != nil {
			return all, fmt.Errorf("%s: step %d: %w", file, i+1, err)
		}
		if files == nil {
			if files, err = dockerfile.OpenContext(dir, file); err != nil {
				return all, err
			}
			defer files.Close()
		}
		c, err := pack(ctx, files, args[0])
		if err != nil {
			return all, fmt.Errorf("%s: copy %s: %w", file, args[0], err)
		}
		all = append(all, c)
		step["args"], step["filesHash"] = args, c.hash
	}
	return all, nil
}

// stringsOf returns a list of strings in JSON. Null is an empty one.
func stringsOf(v any) ([]string, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	var out []string
	return out, json.Unmarshal(b, &out)
}

// pack writes the archive of a source to a temporary file. The hash is the archive's, so
// the same files have the same one.
func pack(ctx context.Context, files *dockerfile.Context, source string) (c copied, err error) {
	f, err := os.CreateTemp("", "postern-copy-")
	if err != nil {
		return c, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if err := os.Remove(f.Name()); err != nil { // so that nothing is left if this program is killed
		return c, err
	}
	sum := sha256.New()
	if err := files.Archive(ctx, io.MultiWriter(f, sum), source, maxCopy); err != nil {
		return c, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	return copied{source, hex.EncodeToString(sum.Sum(nil)), f, size}, err
}

// buildTemplate builds a template from a definition in a file. Its steps copy files from
// dir; empty means the file's directory.
func (l *local) buildTemplate(ctx context.Context, file, dir, name string, out *output) error {
	d, err := readDefinition(file)
	if err != nil {
		return err
	}
	if dir == "" {
		dir = filepath.Dir(file)
	}
	all, err := packCopies(ctx, d, dir, file)
	defer func() {
		for _, c := range all {
			c.close()
		}
	}()
	if err != nil {
		return err
	}
	var s startedBuild
	if err := l.call(ctx, "POST", "/v3/templates", map[string]string{"name": name}, &s); err != nil {
		return err
	}
	for _, c := range all {
		if err := l.uploadCopied(ctx, s.TemplateID, c, out); err != nil {
			return fmt.Errorf("upload %s: %w", c.source, err)
		}
	}
	if err := l.call(ctx, "POST", "/v2/templates/"+s.TemplateID+"/builds/"+s.BuildID, d, nil); err != nil {
		return err
	}
	return l.followBuild(ctx, s, out)
}

// uploadCopied uploads an archive, unless the server has it.
func (l *local) uploadCopied(ctx context.Context, template string, c copied, out *output) error {
	var at struct {
		Present bool
		URL     string
	}
	if err := l.call(ctx, "GET", templatePath(template, "files/"+c.hash), nil, &at); err != nil || at.Present {
		return err
	}
	u, err := url.Parse(at.URL)
	if err != nil {
		return fmt.Errorf("parse the server's upload URL: %w", err)
	}
	// To the server that was asked, whatever host the URL names: files go nowhere else.
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, l.address(u.RequestURI()), io.NewSectionReader(c.file, 0, c.size))
	if err != nil {
		return err
	}
	req.ContentLength = c.size
	l.http.Timeout = 0 // the archive may have a gigabyte
	resp, err := l.do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode >= 300 {
		return failure(resp, b)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "uploaded %s (%d kB)\n", printable(c.source), (c.size+999)/1000)
	return err
}
