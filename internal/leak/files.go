package leak

import (
	"path"
	"strings"
)

// secretFile says whether a file of this name holds secrets by convention.
func secretFile(name string) bool {
	base := strings.ToLower(path.Base(strings.ReplaceAll(name, `\`, "/")))
	switch base {
	case ".env", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".htpasswd", ".git-credentials", ".dockercfg", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519",
		"shadow", "wallet.dat", "credentials", "kubeconfig", "login data", "logins.json", "key4.db", "server.key", "secrets.yml", "secrets.yaml", "secrets.json", "terraform.tfstate":
		return true
	}
	switch path.Ext(base) {
	case ".pem", ".key", ".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".ppk", ".ovpn", ".keytab", ".asc":
		return base != "public.key" && !strings.Contains(base, "public") && !strings.HasSuffix(base, ".pub.asc")
	}
	return strings.HasPrefix(base, ".env.") && !strings.Contains(base, "example") && !strings.Contains(base, "sample")
}
