module example.com/tidegate-recipe

go 1.19
