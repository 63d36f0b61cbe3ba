package rootfs_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"postern/internal/erofs"
	"postern/internal/rootfs"
)

// software returns an image with packages of all kinds.
func software() []entry {
	const (
		status = "Package: bash\nStatus: install ok installed\nArchitecture: amd64\nVersion: 5.2.15-2+b13\nDescription: shell\n more\n\n" +
			"Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\nPackage: libc6\nStatus: install ok installed\nVersion: 2.36"
		apk = "C:Q1x=\nP:musl\nV:1.2.5-r1\nA:x86_64\n\nP:busybox\nV:1.37\nA:x86_64\n\n"
	)
	return []entry{
		file("var/lib/dpkg/status", status), file("var/lib/dpkg/status.d/tzdata", "Package: tzdata\nVersion: 2026a\nArchitecture: all\n"),
		file("var/lib/dpkg/status.d/tzdata.md5sums", "Package: no\nVersion: 1\n"), file("lib/apk/db/installed", apk),
		file("usr/lib/python3/dist-packages/numpy-1.24.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: Num_Py\nVersion: 1.24.2\n\nName: no\nVersion: 9\n"),
		file("opt/x.egg-info", "Name: old\nVersion: 0.1\n"),
		file("usr/lib/node_modules/npm/package.json", `{"name":"npm","version":"10.0.0"}`),
		file("usr/lib/node_modules/@types/node/package.json", `{"name":"@types/node","version":"22.1.0"}`),
		file("app/node_modules/npm/package.json", `{"name":"npm","version":"10.0.0"}`),
		file("app/package.json", `{"name":"app","version":"1.0.0"}`), file("etc/os-release", "NAME=\"Debian\"\nID=debian\n"),
	}
}

func TestPackagesOfAllManagersAreListed(t *testing.T) {
	got := made(t, software()).Packages()
	want := []rootfs.Package{
		{"apk", "busybox", "1.37", "x86_64"},
		{"apk", "musl", "1.2.5-r1", "x86_64"},
		{"deb", "bash", "5.2.15-2+b13", "amd64"},
		{"deb", "libc6", "2.36", ""},
		{"deb", "tzdata", "2026a", "all"},
		{"npm", "@types/node", "22.1.0", ""},
		{"npm", "npm", "10.0.0", ""},
		{"pypi", "Num_Py", "1.24.2", ""},
		{"pypi", "old", "0.1", ""},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

func TestSPDXSaysWhatIsInATree(t *testing.T) {
	d := rootfs.Document{
		Name: "my template", Image: erofs.Digest{1}, Layers: []string{"sha256:" + strings.Repeat("a", 64)},
		Created: time.Unix(1e9, 0), Tool: "postern-1",
	}
	var a, b bytes.Buffer
	if err := made(t, software()).WriteSPDX(&a, d); err != nil {
		t.Fatal(err)
	}
	if err := made(t, software()).WriteSPDX(&b, d); err != nil {
		t.Fatal(err)
	}
	if a.String() != b.String() {
		t.Error("the same tree gives another document")
	}
	var got struct {
		SPDXVersion, DataLicense, SPDXID, Name, DocumentNamespace string
		CreationInfo                                              struct {
			Created  string
			Creators []string
		}
		Packages []struct {
			SPDXID, Name, VersionInfo, DownloadLocation string
			ExternalRefs                                []struct{ ReferenceLocator string }
			Checksums                                   []struct{ Algorithm, ChecksumValue string }
			Comment                                     string
		}
		Relationships []struct{ SpdxElementID, RelationshipType, RelatedSpdxElement string }
	}
	if err := json.Unmarshal(a.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got.SPDXVersion != "SPDX-2.3" || got.DataLicense != "CC0-1.0" || got.CreationInfo.Created != "2001-09-09T01:46:40Z" ||
		got.DocumentNamespace != "https://spdx.org/spdxdocs/my%20template-01000000000000000000000000000000" {
		t.Errorf("got %+v", got)
	}
	if len(got.Packages) != 11 || len(got.Relationships) != 11 {
		t.Fatalf("got %d packages, %d relationships", len(got.Packages), len(got.Relationships))
	}
	if c := got.Packages[0].Comment; !strings.Contains(c, "11 files of ") {
		t.Errorf("comment: %q", c)
	}
	if c := got.Packages[1].Checksums; len(c) != 1 || c[0].ChecksumValue != strings.Repeat("a", 64) {
		t.Errorf("layer: %+v", c)
	}
	ids, urls := map[string]bool{}, map[string]bool{}
	for _, p := range got.Packages {
		if ids[p.SPDXID] {
			t.Errorf("two packages %s", p.SPDXID)
		}
		ids[p.SPDXID] = true
		for _, r := range p.ExternalRefs {
			urls[r.ReferenceLocator] = true
		}
	}
	for _, want := range []string{"pkg:deb/debian/bash@5.2.15-2+b13?arch=amd64", "pkg:npm/%40types/node@22.1.0", "pkg:pypi/num-py@1.24.2"} {
		if !urls[want] {
			t.Errorf("no %s in %v", want, urls)
		}
	}
}

// TestPackagesAreBounded: an image can claim any number of packages, with any names.
func TestPackagesAreBounded(t *testing.T) {
	var many strings.Builder
	for i := range 30_000 {
		fmt.Fprintf(&many, "Package: p%d\nVersion: 1\n\n", i)
	}
	got := made(t, []entry{file("var/lib/dpkg/status", many.String())}).Packages()
	if len(got) != 20_000 {
		t.Errorf("got %d packages", len(got))
	}
	got = made(t, []entry{
		file("var/lib/dpkg/status", "Package: "+strings.Repeat("x", 300)+"\nVersion: 1\n\nPackage: a\x1b[31m\nVersion: 1\n\nPackage: \xff\nVersion: 1\n\n"+
			strings.Repeat("y", 1<<20)+"\nPackage: ok\nVersion: 1\n"),
		dir("lib"), dir("lib/apk"), dir("lib/apk/db"), dir("lib/apk/db/installed"),
		link("a/node_modules/b/package.json", "/etc/shadow"),
		file("c/node_modules/d/package.json", strings.Repeat("[", 1<<16)),
	}).Packages()
	if d := cmp.Diff([]rootfs.Package{{"deb", "ok", "1", ""}}, got); d != "" {
		t.Errorf("(-want +got)\n%s", d)
	}
}

// FuzzPackages: whatever the databases hold, the record is valid JSON.
func FuzzPackages(f *testing.F) {
	for _, e := range software() {
		f.Add(e.body, e.body)
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		if len(a)+len(b) > 1<<16 {
			return
		}
		tree := rootfs.New()
		for name, content := range map[string]string{
			"/var/lib/dpkg/status": a, "/lib/apk/db/installed": b, "/p/x.dist-info/METADATA": a, "/n/node_modules/x/package.json": b, "/etc/os-release": a,
		} {
			if err := tree.WriteFile(name, content, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		var out bytes.Buffer
		if err := tree.WriteSPDX(&out, rootfs.Document{Name: a, Tool: "t"}); err != nil {
			t.Fatal(err)
		}
		if !json.Valid(out.Bytes()) {
			t.Errorf("not JSON: %s", out.Bytes())
		}
	})
}
