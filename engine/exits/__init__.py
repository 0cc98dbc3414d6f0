"""Early exits: heads stored beside a model, and the model that ends at one of them."""
