package e2bapi

import (
	"bufio"
	"bytes"
	"net/http"
	"runtime/debug"
	"strconv"
	"time"

	"postern/internal/auth"
	"postern/internal/build"
	"postern/internal/rootfs"
)

// Routes of Postern's own beside those of E2B: what a template is made of, and its image
// out and in. The command "postern template" uses them.

// templateRecord answers with what the finished build of a name is made of.
func (s *Server) templateRecord(w http.ResponseWriter, r *http.Request, who auth.Principal, name string) error {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	rec, err := bs.Record(r.Context(), who, name)
	if err != nil {
		return err
	}
	b := rec.Build
	m := s.templateInfo(rec.Template)
	m["buildID"], m["buildStatus"], m["cpuCount"], m["memoryMB"], m["diskSizeMB"] = b.ID, b.State, int64(b.CPUs), b.MemoryMB, b.DiskMB
	m["tags"], m["layers"] = orEmpty(rec.Tags), orEmpty(b.Result.Layers)
	m["image"], m["imageBytes"], m["source"] = b.Image, b.Result.Bytes, b.Result.Source
	m["fromImage"], m["fromTemplate"], m["steps"] = "", "", len(b.Definition.Steps)
	m["startCmd"], m["readyCmd"] = b.Result.StartCmd, b.Result.ReadyCmd
	// Another project learns what a published template holds, and not how it was made:
	// references and commands may name what is private.
	if rec.Template.Project == who.Project {
		m["fromImage"], m["fromTemplate"] = b.Definition.FromImage, b.Definition.FromTemplate
	} else {
		m["source"], m["startCmd"], m["readyCmd"] = "", "", ""
	}
	m["packages"] = each(rec.Packages, func(p rootfs.Package) map[string]any {
		return map[string]any{"kind": p.Kind, "name": p.Name, "version": p.Version, "arch": p.Arch}
	})
	reply(w, http.StatusOK, m)
	return nil
}

// templateSPDX answers with the same as a document in SPDX.
func (s *Server) templateSPDX(w http.ResponseWriter, r *http.Request, who auth.Principal, name string) error {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	var b bytes.Buffer // some megabytes: packages are bounded, and files are not listed
	if err := bs.WriteSPDX(r.Context(), who, name, tool(), &b); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/spdx+json")
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(b.Bytes())
	return nil
}

// tool names this program, as SPDX has it.
func tool() string {
	if i, ok := debug.ReadBuildInfo(); ok && i.Main.Version != "" {
		return "postern-" + i.Main.Version
	}
	return "postern"
}

// exportTemplate answers with the image of a template: an OCI layout as a tar archive.
func (s *Server) exportTemplate(w http.ResponseWriter, r *http.Request, who auth.Principal, name string) (err error) {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	e, err := bs.Export(r.Context(), who, name)
	if err != nil {
		return err
	}
	defer e.Close()
	w.Header().Set("Content-Type", "application/x-tar")
	w.Header().Set("Content-Disposition", "attachment; filename="+strconv.Quote(e.Name()))
	w.WriteHeader(http.StatusOK)
	out := bufio.NewWriterSize(&progressWriter{w, http.NewResponseController(w)}, 1<<18)
	if err = e.Write(r.Context(), out); err == nil {
		err = out.Flush()
	}
	if err != nil {
		// The status has been sent: a part must not look complete.
		s.log.WarnContext(r.Context(), "export template", "template", name, "err", err)
		panic(http.ErrAbortHandler)
	}
	return nil
}

// A progressWriter gives each piece of a long answer a deadline of its own.
type progressWriter struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func (p *progressWriter) Write(b []byte) (int, error) {
	_ = p.rc.SetWriteDeadline(time.Now().Add(bodyTime)) // not every connection has deadlines
	return p.w.Write(b)
}

// importTemplate builds a template from an image in the body.
func (s *Server) importTemplate(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	bs, err := s.builds()
	if err != nil {
		return err
	}
	rc := http.NewResponseController(w)
	body := &progressReader{r: r.Body, rc: rc}
	t, b, err := bs.Import(r.Context(), who, build.Request{Name: r.PathValue("template")}, body)
	_ = rc.SetReadDeadline(time.Time{})
	if err != nil {
		return err
	}
	reply(w, http.StatusAccepted, map[string]any{
		"templateID": t.ID, "buildID": b.ID, "public": t.Public, "aliases": orEmpty(t.Names), "names": fullNames(t), "tags": orEmpty(b.Tags),
	})
	return nil
}
