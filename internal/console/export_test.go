package console

// SafeName is the name under which a file is saved.
func SafeName(name string) string { return safeName(name) }

// Rendered is a mail's HTML as the frame shows it.
func Rendered(doc string) (string, int, int, error) {
	r, err := rendered(doc)
	return string(r.Document), r.Remote, r.Left, err
}

// ClosedRoutes returns the method and path of each route that needs a person.
func ClosedRoutes() (out [][2]string) {
	for _, rt := range (&Server{}).table() {
		if rt.needs != open {
			out = append(out, [2]string{rt.method, rt.path})
		}
	}
	return out
}

// ChangingForms returns the path of each form that a viewer has not.
func ChangingForms() (out []string) {
	for _, rt := range (&Server{}).table() {
		if rt.method == "POST" && (rt.needs == decides || rt.needs == manages) {
			out = append(out, rt.path)
		}
	}
	return out
}

// Forms returns the path of each form.
func Forms() (out []string) {
	for _, rt := range (&Server{}).table() {
		if rt.method == "POST" {
			out = append(out, rt.path)
		}
	}
	return out
}
