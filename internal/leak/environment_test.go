package leak

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

func TestEnvironmentDumpsAreFound(t *testing.T) {
	env := []string{"PATH=/usr/local/bin:/usr/bin", "HOME=/home/user", "LANG=C.UTF-8", "FEED=x1"}
	object := map[string]string{}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		object[name] = value
	}
	plain, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	pretty, err := json.MarshalIndent(map[string]any{"rows": 3, "meta": object}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	inText, err := json.Marshal(map[string]string{"note": string(plain)})
	if err != nil {
		t.Fatal(err)
	}
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write([]byte(strings.Join(env, "\n"))); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		data string
		want bool
	}{
		{"lines", strings.Join(env, "\n"), true},
		{"as the kernel writes them", strings.Join(env, "\x00") + "\x00", true},
		{"exported", "export " + strings.Join(env, "\nexport "), true},
		{"an object", string(plain), true},
		{"an object in an object", string(pretty), true},
		{"JSON in a text of JSON", string(inText), true},
		{"a table", "name,value\nPATH,/usr/bin\nHOME,/root\nUSER,root\n", true},
		{"in base64", base64.StdEncoding.EncodeToString([]byte(strings.Join(env, "\n"))), true},
		{"packed", packed.String(), true},
		{"a script", "#!/bin/sh\nPATH=/usr/bin:$PATH\nexport PATH\necho $HOME ${USER}\n", false},
		{"prose", "Set PATH, HOME and USER before you start it: PATH is a list.", false},
		{"a table of paths", "id,PATH\n1,/data/a\n2,/data/b\n", false},
		{"other names", "MYPATH=/a\nXHOME=/b\nUSERS=3\n", false},
	} {
		got := Find(Message{Files: []File{{Name: "output.json", Data: []byte(tt.data)}}})
		if has := slices.Contains(got.Flags, FlagEnv); has != tt.want {
			t.Errorf("%s: flags %v, findings %v", tt.name, got.Flags, got.Findings)
		}
	}
}
