package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A projectTemplate is a template in E2B's API.
type projectTemplate struct {
	TemplateID  string    `json:"templateID"`
	BuildStatus string    `json:"buildStatus"`
	Public      bool      `json:"public"`
	Names       []string  `json:"names"`
	UpdatedAt   time.Time `json:"updatedAt"`
}

// A templateRecord describes what a template consists of.
type templateRecord struct {
	projectTemplate

	BuildID      string            `json:"buildID"`
	Tags         []string          `json:"tags"`
	Image        string            `json:"image"` // digest, in hex
	ImageBytes   int64             `json:"imageBytes"`
	Source       string            `json:"source"` // digest of the image from which the build started
	FromImage    string            `json:"fromImage"`
	FromTemplate string            `json:"fromTemplate"`
	Steps        int               `json:"steps"`
	StartCmd     string            `json:"startCmd"`
	ReadyCmd     string            `json:"readyCmd"`
	Layers       []string          `json:"layers"` // digests of the layers of its steps
	CPUCount     int64             `json:"cpuCount"`
	MemoryMB     int64             `json:"memoryMB"`
	DiskSizeMB   int64             `json:"diskSizeMB"`
	Packages     []templatePackage `json:"packages"`
}

// A templatePackage is a piece of software in a template.
type templatePackage struct {
	Kind    string `json:"kind"`
	Name    string `json:"name"`
	Version string `json:"version"`
	Arch    string `json:"arch"`
}

// templatePath returns a path of a template, or of a part of it.
func templatePath(name, part string) string {
	p := "/templates/" + url.PathEscape(name)
	if part != "" {
		p += "/" + part
	}
	return p
}

func noTemplate(name string, err error) error {
	return notFoundAs(err, "the project has no finished template %q; postern template list shows all templates", name)
}

func (l *local) projectTemplates(ctx context.Context) ([]templateFacts, error) {
	var list []projectTemplate
	if err := l.call(ctx, "GET", "/templates", nil, &list); err != nil {
		return nil, err
	}
	var out []templateFacts
	for _, p := range list {
		name := ""
		if len(p.Names) > 0 {
			name = p.Names[0][strings.LastIndex(p.Names[0], "/")+1:]
		}
		out = append(out, templateFacts{Name: name, ID: p.TemplateID, Of: "project", State: p.BuildStatus, Public: p.Public, Built: p.UpdatedAt})
	}
	return out, nil
}

func (l *local) inspectTemplate(ctx context.Context, name string, spdx bool, out *output) error {
	if spdx {
		return noTemplate(name, l.download(ctx, templatePath(name, "spdx"), "", out))
	}
	var r templateRecord
	if err := l.call(ctx, "GET", templatePath(name, "record"), nil, &r); err != nil {
		return noTemplate(name, err)
	}
	return out.facts(r, func() error {
		from := r.FromImage
		if from == "" {
			from = r.FromTemplate
		}
		kinds := map[string]int{}
		for _, p := range r.Packages {
			kinds[p.Kind]++
		}
		var packages []string
		for k, n := range kinds {
			packages = append(packages, fmt.Sprintf("%d %s", n, k))
		}
		slices.Sort(packages)
		rows := [][]string{
			{"template", printable(strings.Join(r.Names, ", "))},
			{"id", r.TemplateID},
			{"build", r.BuildID},
			{"tags", printable(strings.Join(r.Tags, ", "))},
			{"public", yesNo(r.Public)},
			{"from", printable(from)},
			{"source", r.Source},
			{"image", r.Image},
			{"on disk", fmt.Sprintf("%d MB", r.ImageBytes/1e6)}, // beside what it shares with its base
			{"CPUs", orDefault(r.CPUCount, "")},
			{"memory", orDefault(r.MemoryMB, " MiB")},
			{"disk", orDefault(r.DiskSizeMB, " MiB")},
			{"start", printable(r.StartCmd)},
			{"ready", printable(r.ReadyCmd)},
			{"steps", strconv.Itoa(r.Steps)},
			{"packages", strings.Join(packages, ", ")},
		}
		for i, d := range r.Layers {
			rows = append(rows, []string{"layer " + strconv.Itoa(i+1), d})
		}
		return out.table(slices.DeleteFunc(rows, func(r []string) bool { return r[1] == "" }))
	})
}

// orDefault formats a size of a template's sandboxes.
func orDefault(n int64, unit string) string {
	if n == 0 {
		return "the server's default"
	}
	return strconv.FormatInt(n, 10) + unit
}

// startedBuild is the answer to a request for a build.
type startedBuild struct {
	TemplateID string   `json:"templateID"`
	BuildID    string   `json:"buildID"`
	Names      []string `json:"names"`
}

// followBuild prints the log of a build until it ends.
func (l *local) followBuild(ctx context.Context, s startedBuild, out *output) error {
	for n := 0; ; {
		var st struct {
			Status     string
			LogEntries []struct{ Level, Message string }
			Reason     *struct{ Message, Step string }
		}
		if err := l.call(ctx, "GET", fmt.Sprintf("/templates/%s/builds/%s/status?level=info&logsOffset=%d", s.TemplateID, s.BuildID, n), nil, &st); err != nil {
			return err
		}
		for _, e := range st.LogEntries {
			fmt.Fprintln(out, printable(e.Message)) // output of the steps
		}
		n += len(st.LogEntries)
		switch {
		case len(st.LogEntries) > 0: // there may be more
			continue
		case st.Status == "ready":
			_, err := fmt.Fprintf(out, "template %s: build %s is ready\n", printable(strings.Join(s.Names, ", ")), s.BuildID)
			return err
		case st.Status == "error" && st.Reason != nil:
			return fmt.Errorf("build %s failed in step %s: %s", s.BuildID, printable(st.Reason.Step), printable(st.Reason.Message))
		case st.Status == "error":
			return fmt.Errorf("build %s failed", s.BuildID)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(300 * time.Millisecond):
		}
	}
}

func (l *local) importTemplate(ctx context.Context, file, name string, out *output) error {
	body, size, err := openImage(file)
	if err != nil {
		return err
	}
	defer body.Close()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, l.address(templatePath(name, "import")), body)
	if err != nil {
		return err
	}
	req.ContentLength = size
	req.Header.Set("Content-Type", "application/x-tar")
	l.http.Timeout = 0 // the image may have gigabytes
	resp, err := l.do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return failure(resp, b)
	}
	var s startedBuild
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("parse the server's response: %w", err)
	}
	return l.followBuild(ctx, s, out)
}

// openImage opens a file, or a directory as a tar archive. Size is -1 if it is unknown.
func openImage(name string) (r io.ReadCloser, size int64, err error) {
	info, err := os.Stat(name)
	if err != nil {
		return nil, 0, err
	}
	if !info.IsDir() {
		f, err := os.Open(name)
		return f, info.Size(), err
	}
	root, err := os.OpenRoot(name)
	if err != nil {
		return nil, 0, err
	}
	pr, pw := io.Pipe()
	go func() {
		w := tar.NewWriter(pw)
		err := w.AddFS(root.FS())
		pw.CloseWithError(errors.Join(err, w.Close(), root.Close())) // nil means io.EOF
	}()
	return pr, -1, nil
}
