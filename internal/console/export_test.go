package console

// ClosedRoutes returns the method and path of each route that needs a person.
func ClosedRoutes() (out [][2]string) {
	for _, rt := range table {
		if !rt.open {
			out = append(out, [2]string{rt.method, rt.path})
		}
	}
	return out
}
